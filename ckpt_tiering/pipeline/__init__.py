"""The data path. Stages never import one another; what passes between them passes the journal.

::

    trainer                    agent
    -------                    ------------------------------------------------------------------
    stage  -- seal on NVMe -->  admit -> upload -> verify -> commit -> settle        (remove)
                                  |         |         |         |         |
                                journal: staged   uploaded  verified  durable   settled
    restore <-- resolve <---------------------- the store: commits/, nodes/, f/, p/
"""
