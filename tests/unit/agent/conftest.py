from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.agent.sessions import node_sessions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpt_tiering.agent.sessions import Sessions
    from tests.unit.world import World


@pytest.fixture
def sessions(node: World) -> Iterator[Sessions]:
    """The agent's sessions, which lead to the node's store."""
    with node_sessions(node) as sessions:
        yield sessions
