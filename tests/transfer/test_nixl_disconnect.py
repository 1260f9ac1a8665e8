"""Peers that nobody uses stay loaded, since NIXL leaks sockets otherwise; but not without bound."""

from __future__ import annotations

from bridge.transfer.nixl import agent as nixl_agent


def test_idle_peers_are_bounded(make_agent, monkeypatch):
    monkeypatch.setattr(nixl_agent, "MAX_IDLE_PEERS", 2)
    agent = make_agent()
    others = [make_agent(f"prefiller-{i}", serves=True) for i in range(4)]
    for other in others:
        agent.connect(other.metadata()).disconnect()
    assert len(agent._loaded) == 2
    agent.connect(others[0].metadata()).disconnect()
