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


QUICK = {"test_nixl_bad_range.py", "test_nixl_register.py", "test_nixl_read.py", "test_nixl_many_ranges.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Second processes that are stopped, killed and restarted take seconds each."""
    for item in items:
        if "tests/transfer" in str(item.path) and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
