"""LinkTooSlow and the warning before it: the speed that was seen, not the one that was meant."""

from __future__ import annotations

import logging

import pytest

from bridge.transfer import speed
from bridge.transfer.agent import ReadRange
from bridge.transfer.errors import LinkTooSlow
from bridge.transfer.speed import WatchedAgent
from tests.transfer.serving import MIB, content, memory_of, poisoned, wait


@pytest.fixture
def setting(make, served, monkeypatch):
    """(a function that reads 2 MiB four times over a watched agent, and the agent)"""
    monkeypatch.setattr(speed, "WINDOW_BYTES", 8 * MIB)
    made = []

    def watched(**settings):
        agent = WatchedAgent(make(), **settings)
        mine = poisoned(2 * MIB)
        target = agent.register(memory_of(mine))
        peer = agent.connect(served.metadata)

        def window(peer=peer):
            for _ in range(4):
                read = peer.read(served.memory, target, [ReadRange(0, 0, 2 * MIB)])
                wait(read)
                read.release()
            assert (mine == content(4 * MIB, 3)[: 2 * MIB]).all()

        made.append(agent)
        return agent, window

    return watched


def test_fast_enough(setting, caplog):
    agent, window = setting(minimum_gbps=1e-6, refuse=True)
    assert agent.seen_gbps("prefiller") is None
    assert "so far" in agent.transports()
    for _ in range(4):
        window()
    assert agent.warnings == 0
    assert agent.seen_gbps("prefiller") > 1e-6
    assert "seen: prefiller " in agent.transports()
    assert not caplog.records


def test_too_slow_is_a_warning_with_the_transport(setting, caplog):
    agent, window = setting(minimum_gbps=1e6)
    with caplog.at_level(logging.WARNING, "kvbridge.transfer"):
        for _ in range(4):
            window()
    assert agent.warnings == len(caplog.records) == 4
    assert "GB/s where 1e+06 are configured (" in caplog.text
    assert agent.agent.transports() in caplog.text


def test_refused_if_asked_and_tried_anew_after_connecting(setting, served):
    agent, window = setting(minimum_gbps=1e6, refuse=True, strikes=2)
    window()
    window()
    with pytest.raises(LinkTooSlow, match="1e\\+06"):
        window()
    window(agent.connect(served.metadata))


def test_reads_side_by_side_share_the_link(setting, monkeypatch):
    """Two reads at once are not each half as fast."""
    moments = iter([10.0, 10.0, 11.0, 11.0, 20.0, 21.0])
    meter = speed._Meter()
    meter.start(next(moments))
    meter.start(next(moments))
    assert not meter.stop(next(moments), 4 * MIB)
    assert meter.stop(next(moments), 4 * MIB)
    assert meter.gbps == pytest.approx(8 * MIB / 1.0 / 1e9)
    meter.start(next(moments))
    assert meter.stop(next(moments), 8 * MIB)
    assert meter.gbps == pytest.approx(8 * MIB / 1.0 / 1e9), "idle time does not count"
