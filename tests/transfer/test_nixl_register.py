"""Registering memory, describing it, giving it back."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import numpy as np
import pytest

from bridge.transfer.errors import AgentUnavailable, BadRange
from bridge.transfer.nixl.frame import parse_metadata
from tests.transfer.nixl_serving import ROOT, TCP, Serving, content, memory_of, poisoned, read_all


def test_registered_bytes_return_to_zero(make_agent):
    agent = make_agent()
    arrays = [poisoned(n) for n in (1, 4096, 100_000)]
    held = [agent.register(memory_of(a)) for a in arrays]
    assert agent.registered_bytes() == 104_097
    for registration in held:
        registration.release()
        registration.release()
    assert agent.registered_bytes() == 0


@pytest.mark.parametrize(
    "change",
    [
        {"address": 0},
        {"address": -4096},
        {"address": 1 << 64},
        {"address": None},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 1 << 64},
        {"nbytes": 1.5},
        {"index": -1},
        {"device": "hpu"},
    ],
    ids=str,
)
def test_memory_that_cannot_be_is_refused(reader, change):
    good = memory_of(poisoned(4096))
    with pytest.raises(BadRange):
        reader.register(dataclasses.replace(good, **change))
    assert reader.registered_bytes() == 0


def test_more_memory_is_seen_with_newer_metadata(make_agent):
    agent = make_agent()
    with Serving(8192, seed=1, transports=TCP) as serving:
        mine = poisoned(8192)
        target = agent.register(memory_of(mine))
        first = agent.connect(serving.metadata)
        read_all(first, serving.memory, target, 8192)
        metadata, second_memory = serving.ask("more")
        with pytest.raises(BadRange):
            read_all(first, second_memory, target, 8192)
        read_all(agent.connect(metadata), second_memory, target, 8192)
        assert np.array_equal(mine, content(8192, 2))
        read_all(first, serving.memory, target, 8192)
        assert np.array_equal(mine, content(8192, 1))


def test_metadata_names_the_agent(make_agent):
    agent = make_agent("prefiller-7 é", serves=True)
    name, native, blob = parse_metadata(agent.metadata())
    assert name == "prefiller-7 é"
    assert native != parse_metadata(make_agent("prefiller-7 é").metadata())[1]
    assert len(blob) > 50


def test_a_closed_agent_says_so(make_agent):
    agent, other = make_agent(), make_agent("other", serves=True)
    metadata = other.metadata()
    registration = agent.register(memory_of(poisoned(4096)))
    agent.close()
    agent.close()
    registration.release()
    assert agent.registered_bytes() == 0
    for call in (agent.metadata, lambda: agent.register(memory_of(poisoned(4096))), lambda: agent.connect(metadata)):
        with pytest.raises(AgentUnavailable, match="closed"):
            call()


def test_accelerator_memory_without_an_accelerator():
    """Said to be a GPU's on a host without one: refused in words, or taken by UCX for the host memory that it is; never a crash."""
    program = """
from bridge.transfer.errors import RegistrationFailed
from bridge.transfer.nixl import NixlAgent
from tests.transfer.nixl_serving import memory_of, poisoned
import dataclasses
agent = NixlAgent("decoder", serves=False)
for device in ("cuda", "xpu"):
    try:
        agent.register(dataclasses.replace(memory_of(poisoned(4096)), device=device)).release()
        print("accepted", end=" ")
    except RegistrationFailed as error:
        print("refused", end=" ")
print(agent.registered_bytes())
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.fullmatch(r"((accepted|refused) ){2}0\n", run.stdout)
