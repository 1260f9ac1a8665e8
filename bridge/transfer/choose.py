"""One agent by its kind's name, as configurations and the command line name it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

from bridge.handoff.identity import Identity, PeerConfig
from bridge.transfer.agent import Agent
from bridge.transfer.errors import AgentUnavailable

KINDS = ("nixl", "ucx", "stream")
PACKAGES = {"nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "ucx": ("ucxx",), "stream": ()}
"""Of each kind: the modules of which one must be installed; none where kvbridge alone is enough."""


def installed(kind: str) -> bool:
    """Whether a kind's package is there. It may still refuse to start."""
    return not PACKAGES[kind] or any(importlib.util.find_spec(name) is not None for name in PACKAGES[kind])


def open_agent(
    kind: str,
    name: str,
    *,
    identity: Identity,
    peers: Mapping[str, PeerConfig],
    serves: bool,
    host: str = "127.0.0.1",
    port: int = 0,
    transports: Sequence[str] | None = None,
    minimum_gbps: float = 0.0,
    refuse_slow_links: bool = False,
) -> Agent:
    """kind: "nixl", "ucx" or "stream". identity, peers, host, port: of the stream agent's data port. transports: UCX's, for the others.

    minimum_gbps: gigabytes (1e9 bytes) a second that each peer's link must reach, or a warning is logged; with refuse_slow_links, reads
    from it are refused. Zero: not watched. Raises AgentUnavailable, BadIdentity.
    """
    agent: Agent
    if kind == "nixl":
        from bridge.transfer.nixl import NixlAgent

        agent = NixlAgent(name, transports=transports, serves=serves)
    elif kind == "ucx":
        from bridge.transfer.ucx import UcxAgent

        agent = UcxAgent(name, transports=transports, serves=serves)
    elif kind == "stream":
        from bridge.transfer.stream import StreamAgent

        agent = StreamAgent(name, identity, peers, serves=serves, host=host, port=port)
    else:
        raise AgentUnavailable(f"there is no transfer agent {kind!r}", remedy=f"choose one of {', '.join(KINDS)}")
    if minimum_gbps <= 0:
        return agent
    from bridge.transfer.speed import WatchedAgent

    return WatchedAgent(agent, minimum_gbps, refuse=refuse_slow_links)
