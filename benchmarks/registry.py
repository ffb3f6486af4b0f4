"""All variants by name: where they deliver to, and which class measures them. Imports nothing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.variants import Setup, Variant

__all__ = ["VARIANTS", "Kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A variant.

    Attributes:
        made_by: Module and class.
        to: Where its bytes rest when it calls them durable.
        what: One line for the tables.
    """

    made_by: str
    to: str
    what: str

    def make(self, setup: Setup) -> Variant:
        """Make it; imports torch, and for a rival nothing of the rival's yet."""
        module, _, name = self.made_by.partition(":")
        made: Any = getattr(importlib.import_module(f"benchmarks.{module}"), name)
        variant: Variant = made(setup)
        return variant


VARIANTS = {
    "ours": Kind(
        made_by="variants:Ours",
        to="NVMe + S3",
        what="`TieredCheckpointer.save`: digests, NVMe, upload, comparison with the store, commit",
    ),
    "ours_dcp": Kind(
        made_by="variants:OursSharded", to="NVMe + S3", what="the same with `sharded=True`"
    ),
    "memcpy": Kind(
        made_by="variants:Memcpy",
        to="nowhere",
        what="one copy into memory: the floor",
    ),
    "torch_save": Kind(
        made_by="variants:TorchSave", to="disk", what="`torch.save` + fsync, in the step loop"
    ),
    "dcp_thread": Kind(
        made_by="rivals:DcpThread",
        to="S3",
        what="DCP `async_save` THREAD, kept shared-memory stager, s3torchconnector's writer",
    ),
    "dcp_process": Kind(
        made_by="rivals:DcpProcess",
        to="S3",
        what="DCP `async_save` PROCESS, the same stager and writer: the best rival to S3",
    ),
    "s3tc_torch_save": Kind(
        made_by="rivals:S3Writer",
        to="S3",
        what="`torch.save` into s3torchconnector's `S3Checkpoint` writer, in the step loop",
    ),
    "s3tc_dcp": Kind(
        made_by="rivals:DcpSync",
        to="S3",
        what="`dcp.save` to s3torchconnector's `S3StorageWriter`, in the step loop",
    ),
    "lightning_async": Kind(
        made_by="rivals:LightningAsync",
        to="S3",
        what="Lightning's `AsyncCheckpointIO`, to S3 by s3fs",
    ),
    "nvrx_fork": Kind(
        made_by="rivals:NvrxFork",
        to="disk",
        what="nvidia-resiliency-ext, `torch.save` in a forked child; no fsync, cuda stubbed",
    ),
}
