"""The agent's process: ``python -m ckpt_tiering.agent --staging DIR``."""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from pathlib import Path

import psutil

from ckpt_tiering.agent.loop import Agent, Until
from ckpt_tiering.fsio import make_private
from ckpt_tiering.model.layout import StagingLayout

__all__ = ["EXIT_ALREADY_RUNNING", "lock_staging", "main", "serve", "yield_to_training"]

EXIT_ALREADY_RUNNING = 3
_NICEST = 19


def lock_staging(layout: StagingLayout) -> int | None:
    """Take the lock of a staging directory for the life of this process.

    Returns:
        The descriptor that holds the lock; None if another agent has it.
    """
    make_private(layout.staging)
    make_private(layout.agent_dir)
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def yield_to_training() -> None:
    """Take only the processor time and disk bandwidth that nobody else wants."""
    os.nice(_NICEST)
    try:
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    except (OSError, psutil.Error) as error:
        sys.stderr.write(f"disk priority stays as it is: {error}\n")


def serve(agent: Agent, *, background: bool) -> None:
    """Run an agent until it ends by itself or by a signal. Blocks.

    Args:
        agent: The agent; the caller holds the lock of its directory.
        background: Ignore the signals that end a job, as what is staged must still be uploaded;
            otherwise end at the first one, after the parts in hand.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.SIG_IGN if background else lambda *_: agent.stop()
        signal.signal(number, handler)
    agent.run()


def main(arguments: list[str] | None = None) -> int:
    """Run the agent of a staging directory; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ckpt_tiering.agent")
    parser.add_argument("--staging", type=Path, required=True)
    parser.add_argument("--foreground", action="store_true", help="stay until a signal comes")
    options = parser.parse_args(arguments)
    layout = StagingLayout(options.staging.absolute())
    lock = lock_staging(layout)
    if lock is None:
        sys.stderr.write(f"an agent already serves {layout.staging}\n")
        return EXIT_ALREADY_RUNNING
    yield_to_training()
    until: Until = "stopped" if options.foreground else "no_trainer"
    serve(Agent(layout, until=until), background=not options.foreground)
    return 0


if __name__ == "__main__":
    sys.exit(main())
