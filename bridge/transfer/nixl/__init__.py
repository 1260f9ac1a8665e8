"""The NIXL agent: reads over UCX between hosts and between accelerators."""

from bridge.transfer.nixl.agent import NixlAgent, NixlCounters, NixlPeer, NixlRegistration, NixlTransfer

__all__ = ["NixlAgent", "NixlCounters", "NixlPeer", "NixlRegistration", "NixlTransfer"]
