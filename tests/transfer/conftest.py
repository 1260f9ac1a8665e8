from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bridge.transfer.nixl import NixlAgent
from tests.transfer import agents
from tests.transfer.serving import MIB, Serving, closing


@pytest.fixture(params=agents.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The suite that all agents share runs once for each of them."""
    return request.param


@pytest.fixture
def make(kind: str) -> Iterator[Callable[..., Any]]:
    """Makes agents of the kind, which only read unless told otherwise, over TCP, and closes them."""

    def one(name: str = "decoder", *, serves: bool = False, **settings: Any) -> Any:
        return agents.make(kind, name, serves=serves, files=agents.identities(), **settings)

    with closing(one) as made:
        yield made


# Not longer than these tests: NIXL's thread in it keeps a core half busy.
@pytest.fixture(scope="package")
def _served() -> Iterator[dict[str, Serving]]:
    processes: dict[str, Serving] = {}
    yield processes
    for process in processes.values():
        process.__exit__()


@pytest.fixture
def served(kind: str, _served: dict[str, Serving]) -> Serving:
    """A process of the kind that serves 4 MiB of content(4 MiB, 3), for tests that leave it as it is."""
    if kind not in _served:
        _served[kind] = Serving(4 * MIB, kind=kind, seed=3)
    return _served[kind]


@pytest.fixture(scope="module")
def reader() -> Iterator[NixlAgent]:
    """One agent for tests that leave no trace in it."""
    agent = NixlAgent("reader", transports=["tcp"], serves=False)
    yield agent
    agent.close()


@pytest.fixture
def make_agent() -> Iterator[Callable[..., NixlAgent]]:
    """Makes NIXL agents that only read, over TCP unless told otherwise, and closes them."""

    def one(name: str = "decoder", **settings: object) -> NixlAgent:
        return NixlAgent(name, **({"transports": ["tcp"], "serves": False} | settings))  # type: ignore[arg-type]

    with closing(one) as made:
        yield made


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of threads; those that begin with one of them cannot be started, as where a limit is reached."""
    names: set[str] = set()
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(names)):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return names


QUICK = {
    "test_nixl_pieces.py",
    "test_metadata.py",
    "test_connect.py",
    "test_read.py",
    "test_counters.py",
    "test_error_bad_range.py",
    "test_error_peer_unreachable.py",
    "test_stream_frames.py",
    "test_ucx_messages.py",
    "test_ucx_owner.py",
    "test_ucx_busy.py",
    "test_nixl_busy.py",
    "test_stream_connect.py",
    "test_starting.py",
    "test_nixl_log.py",
    "test_stream_owner.py",
}


@pytest.hookimpl(tryfirst=True)  # before those that lack what they need are deselected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Second processes that are stopped, killed and restarted take seconds each. The suite's runs over the ucx agent need ucxx."""
    for item in items:
        if "tests/transfer" in str(item.path) and item.path.name not in QUICK:
            item.add_marker(pytest.mark.slow)
        call = getattr(item, "callspec", None)
        if call is not None and call.params.get("kind") == "ucx":
            item.add_marker(pytest.mark.ucxx)
