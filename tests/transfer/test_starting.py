"""Agents that start at the same time: the libraries are told by variables of the environment, which are the process's."""

from __future__ import annotations

import os
import threading

import pytest

from bridge.transfer.errors import AgentUnavailable
from bridge.transfer.nixl import NixlAgent
from bridge.transfer.nixl import library as nixl_library
from bridge.transfer.ucx import library as ucx_library
from bridge.transfer.ucx import worker as ucx_worker
from bridge.transfer.ucx.worker import UcxWorker
from bridge.transfer.ucx_environment import STARTING
from tests.transfer import agents


@pytest.mark.ucxx
def test_what_one_sets_for_itself_the_other_does_not_take_for_the_operators(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    begun, go_on, made = threading.Event(), threading.Event(), []

    def load():
        assert os.environ["UCX_TLS"] == "self,tcp,sm"
        begun.set()
        go_on.wait(60)
        raise AgentUnavailable("enough")

    def nixl():
        with pytest.raises(AgentUnavailable, match="enough"):
            NixlAgent("one", transports=["self", "tcp", "sm"])

    monkeypatch.setattr(nixl_library, "load", load)
    first = threading.Thread(target=nixl, daemon=True)
    first.start()
    assert begun.wait(30)
    second = threading.Thread(target=lambda: made.append(agents.make("ucx", "two", serves=False, files={})), daemon=True)
    second.start()
    second.join(0.5)
    go_on.set()
    first.join(30)
    second.join(30)
    (agent,) = made
    try:
        assert agent.transports() == "UCX_TLS=tcp from the configuration; nothing is connected"
        assert "UCX_TLS" not in os.environ
    finally:
        agent.close()


def test_two_of_a_kind(monkeypatch):
    """The second said that the operator had chosen what the first was configured with."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    begun, go_on, said = threading.Event(), threading.Event(), []

    def load():
        begun.set()
        go_on.wait(60)
        raise AgentUnavailable("enough")

    def environment(values):
        said.append(values.get("UCX_TLS"))
        return real(values)

    def nixl(transports):
        with pytest.raises(AgentUnavailable, match="enough"):
            nixl_library.start("kv", transports, False)

    real = nixl_library.environment
    monkeypatch.setattr(nixl_library, "load", load)
    monkeypatch.setattr(nixl_library, "environment", environment)
    monkeypatch.setenv("UCX_LOG_LEVEL", "warn")  # or the first opens UCX's log as well
    threads = [threading.Thread(target=nixl, args=([name],), daemon=True) for name in ("tcp", "sysv")]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[1].join(0.5)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert said == ["tcp", "sysv"]


@pytest.mark.ucxx
def test_loading_ucxx_takes_back_its_own_variables_and_nobody_elses(monkeypatch):
    def loads(name):
        os.environ["UCX_MADE_UP"] = os.environ["ANOTHER_THREADS"] = "1"
        raise ModuleNotFoundError("no", name="ucxx")

    monkeypatch.setattr(ucx_library.importlib, "import_module", loads)
    with STARTING, pytest.raises(AgentUnavailable):
        ucx_library.load()
    monkeypatch.undo()
    assert os.environ.pop("ANOTHER_THREADS", None) == "1"
    assert os.environ.pop("UCX_MADE_UP", None) is None


@pytest.mark.parametrize("given", [None, "off"])
def test_reads_of_device_memory_are_left_on_unless_the_operator_says_otherwise(monkeypatch, given):
    """Without NVLink UCX takes TCP for them by itself: found on a single card, where two processes had 0.5 GB/s."""
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    seen = []

    def load():
        seen.append(os.environ.get(name))
        raise AgentUnavailable("enough")

    monkeypatch.setattr(nixl_library, "load", load)
    monkeypatch.setattr(ucx_worker, "load", load)
    for make in (lambda: NixlAgent("one"), lambda: UcxWorker(None, lambda message: None, lambda: None)):
        with pytest.raises(AgentUnavailable, match="enough"):
            make()
    assert seen == [given or "on"] * 2
    assert os.environ.get(name) == given
