"""Tiered checkpoints for Lightning: ``Trainer(plugins=[TieredCheckpointIO("s3://...")])``.

That line is all. The callback that reports the durable lag and watches over the end of training
attaches itself through an entry point of Lightning's, and does nothing in other trainers.
"""

from __future__ import annotations

try:
    import lightning.pytorch as _  # noqa: F401  only to say what is missing
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"ckpt_tiering_lightning needs {error.name}: pip install 'ckpt-tiering[lightning]'",
        name=error.name,
    ) from error

from ckpt_tiering_lightning.checkpoint_io import TieredCheckpointIO
from ckpt_tiering_lightning.fabric import attach

__all__ = ["TieredCheckpointIO", "attach"]
