from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bridge.transfer.nixl import NixlAgent
from tests.transfer.nixl_serving import KEPT


@pytest.fixture(scope="module")
def reader() -> Iterator[NixlAgent]:
    """One agent for tests that leave no trace in it."""
    agent = NixlAgent("reader", transports=["tcp"], serves=False)
    yield agent
    agent.close()


@pytest.fixture
def make_agent() -> Iterator[Callable[..., NixlAgent]]:
    """Makes agents that only read, over TCP unless told otherwise, and closes them."""
    made: list[NixlAgent] = []

    def make(name: str = "decoder", **settings: object) -> NixlAgent:
        settings = {"transports": ["tcp"], "serves": False} | settings
        made.append(NixlAgent(name, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for agent in made:
        agent.close()
    KEPT.clear()
