"""Checkpoints from memory to local NVMe to object storage, in the background, proven durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_tiering.api import SaveInfo, TieredCheckpointer
    from ckpt_tiering.config import TieringConfig

__version__ = "0.1.0"
__all__ = ["SaveInfo", "TieredCheckpointer", "TieringConfig", "__version__"]

_HOMES = {
    "SaveInfo": "ckpt_tiering.api",
    "TieredCheckpointer": "ckpt_tiering.api",
    "TieringConfig": "ckpt_tiering.config",
}


def __getattr__(name: str) -> Any:
    # Importing the package must not cost a training process anything it does not use.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
