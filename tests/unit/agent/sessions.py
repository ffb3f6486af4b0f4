"""The agent's sessions of a node, without its process."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ckpt_tiering.agent.sessions import Sessions
from tests.unit.world import URL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.world import World


@contextmanager
def node_sessions(node: World) -> Iterator[Sessions]:
    """Sessions that lead to the node's store, which was probed before."""
    node.journal.set_capabilities(str(URL), json.dumps(asdict(node.can)))
    sessions = Sessions(
        node.journal,
        node.clock,
        threading.Event(),
        node.meter,
        opener=lambda *_, **__: node.store,
    )
    try:
        yield sessions
    finally:
        sessions.close()
