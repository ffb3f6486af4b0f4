"""Staged saves and bare looks at a store, for tests that need no trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_tiering.clock import SystemClock
from ckpt_tiering.config import StoreOptions
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.model.seal import ShardHeader
from ckpt_tiering.pipeline.stage import ShardWriter
from ckpt_tiering.reader import Reader
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping

PART_BYTES = 5 * MIB
RUN_LIMIT_S = 90


def stage_save(
    staging: Path,
    url: str,
    files: Mapping[str, bytes],
    *,
    step: int = 10,
    incarnation: str = "abcd1234",
    node_rank: int = 0,
    num_nodes: int = 1,
    name: str | None = None,
) -> SaveId:
    """Stage and seal a save as a trainer would, without telling any agent."""
    save_id = SaveId(step, incarnation)
    header = ShardHeader(
        url=StoreUrl.parse(url),
        store_options=StoreOptions().model_dump(),
        save_id=save_id,
        name=name,
        metadata={},
        rank=node_rank,
        ranks_on_node=1,
        node_rank=node_rank,
        num_nodes=num_nodes,
        part_bytes=PART_BYTES,
    )
    writer = ShardWriter(StagingLayout(staging), header, SystemClock())
    for path, data in files.items():
        with writer.open(path) as file:
            file.write(data)
    writer.seal()
    return save_id


def run_agent(staging: Path, record: Path, *, at: str | None = None) -> int:
    """Run a killable agent until it is idle or dead; return its exit code (-9 when killed)."""
    command = [sys.executable, "-m", "ckpt_tiering.testing.killable"]
    arguments = ["--staging", str(staging), "--record", str(record)]
    done = subprocess.run(
        [*command, *arguments, *(["--at", at] if at else [])],
        env=dict(os.environ),
        timeout=RUN_LIMIT_S,
        check=False,
    )
    return done.returncode


def calls(record: Path) -> list[str]:
    """Return the names of the calls that an agent noted, such as ``put_part:2``."""
    return [line.split("\t")[0] for line in record.read_text(encoding="utf-8").splitlines()]


def reader(url: str, staging: Path | None = None) -> Reader:
    """Open a run for reading, as another process on another node would."""
    return Reader(
        StoreUrl.parse(url), StoreOptions(), layout=StagingLayout(staging) if staging else None
    )


def tree(root: Path) -> dict[str, bytes | str]:
    """Return all files of a directory with their contents, and links with their targets."""
    found: dict[str, bytes | str] = {}
    for directory, folders, names in os.walk(root):
        for name in names + [f for f in folders if (Path(directory) / f).is_symlink()]:
            path = Path(directory) / name
            relative = path.relative_to(root).as_posix()
            found[relative] = str(path.readlink()) if path.is_symlink() else path.read_bytes()
    return found
