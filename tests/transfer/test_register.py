"""Agent.register and Registration.release."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bridge.transfer.errors import BadRange, TransferFailed
from tests.transfer.serving import MIB, POISON, Serving, content, memory_of, poisoned, read_all


def test_registered_bytes_return_to_zero(make):
    agent = make()
    held = [agent.register(memory_of(poisoned(n))) for n in (1, 4096, 100_000)]
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
def test_memory_that_cannot_be_is_refused(make, change):
    agent = make()
    with pytest.raises(BadRange):
        agent.register(dataclasses.replace(memory_of(poisoned(4096)), **change))
    assert agent.registered_bytes() == 0


def test_more_memory_is_seen_with_newer_metadata(make, kind):
    agent = make()
    with Serving(8192, kind=kind, seed=1) as serving:
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


def test_memory_that_the_owner_released_is_not_read(make, kind):
    """NIXL cannot do that: a peer that knows the memory goes on reading it (docs/security.md)."""
    agent = make()
    with Serving(MIB, kind=kind, seed=1) as serving:
        mine = poisoned(MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(serving.metadata)
        read_all(peer, serving.memory, target, MIB)
        serving.ask("release")
        mine[:] = POISON
        if kind == "nixl":
            read_all(peer, serving.memory, target, 4096)
            assert (mine[:4096] == 0xEE).all()
            return
        with pytest.raises(TransferFailed, match="not registered"):
            read_all(peer, serving.memory, target, 4096)
        assert (mine == POISON).all()
        metadata, memory = serving.ask("more")
        read_all(agent.connect(metadata), memory, target, MIB)
        assert np.array_equal(mine, content(MIB, 2))
