"""What an agent counts."""

from __future__ import annotations

from bridge.transfer.agent import ReadRange
from tests.transfer.serving import MIB, memory_of, poisoned, wait


def test_counters(make, served):
    agent = make()
    target = agent.register(memory_of(poisoned(MIB)))
    peer = agent.connect(served.metadata)
    before = agent.counters()
    for _ in range(3):
        wait(peer.read(served.memory, target, [ReadRange(0, 0, 1000), ReadRange(2000, 1000, 24)]))
    after = agent.counters()
    assert before.reads_started == before.reads_finished == before.bytes_read == 0
    assert (after.reads_started, after.reads_finished, after.bytes_read) == (3, 3, 3072)
    assert (after.reads_failed, after.reads_given_up, after.reads_quarantined, after.in_quarantine) == (0, 0, 0, 0)
