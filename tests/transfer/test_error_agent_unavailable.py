"""AgentUnavailable: the package is missing or broken, a name that cannot be, an agent that was closed. One sentence each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bridge.transfer.errors import AgentUnavailable
from tests.transfer import agents
from tests.transfer.serving import ROOT, memory_of, poisoned

PROGRAM = """
import sys
from bridge.errors import KVBridgeError

class Absent:
    # as if these were not installed
    def find_spec(self, name, path=None, target=None):
        if name in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from tests.transfer import agents
try:
    agents.make(sys.argv[1], "decoder", serves=False, files={})
except KVBridgeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("missing", "modules", "says"),
    [
        ("nixl", "nixl,nixl_cu12,nixl_cu13", "NIXL is not installed; pip install nixl-cu12"),
        ("ucx", "ucxx", "ucxx is not installed; pip install ucxx-cu12"),
    ],
)
def test_not_installed(missing, modules, says):
    run = subprocess.run([sys.executable, "-c", PROGRAM, missing, modules], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("AgentUnavailable " + says)
    assert run.stdout.count("\n") == 1


@pytest.mark.parametrize("name", ["", "x" * 129, "é" * 65], ids=["empty", "long", "long in UTF-8"])
def test_names(kind, name):
    with pytest.raises(AgentUnavailable, match="name"):
        agents.make(kind, name, serves=False, files=agents.identities())


@pytest.mark.parametrize("transports", [[], [""], ["tcp;rm"], ["tcp", "a b"], ["nonsense"]], ids=str)
@pytest.mark.parametrize("kind", ["nixl", "ucx"])
def test_transports_that_are_none(kind, transports):
    with pytest.raises(AgentUnavailable) as caught:
        agents.make(kind, "decoder", serves=False, files={}, transports=transports)
    assert "\n" not in str(caught.value)


def test_a_port_that_is_taken():
    first = agents.make("stream", "first", serves=True, files=agents.identities())
    try:
        with pytest.raises(AgentUnavailable, match="choose another port"):
            agents.make("stream", "second", serves=True, files=agents.identities(), port=first._listener.port)
    finally:
        first.close()


def test_closed(make):
    agent, other = make(), make("other", serves=True)
    metadata = other.metadata()
    registration = agent.register(memory_of(poisoned(4096)))
    agent.close()
    agent.close()
    registration.release()
    assert agent.registered_bytes() == 0
    for call in (agent.metadata, lambda: agent.register(memory_of(poisoned(4096))), lambda: agent.connect(metadata)):
        with pytest.raises(AgentUnavailable, match="closed"):
            call()
