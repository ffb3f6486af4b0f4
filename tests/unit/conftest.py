from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.world import World, world

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path) -> Iterator[World]:
    """A node with an honest store."""
    with world(tmp_path / "nvme") as node:
        yield node
