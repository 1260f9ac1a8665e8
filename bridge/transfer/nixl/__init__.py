"""The NIXL agent: reads over UCX between hosts and between accelerators."""

from bridge.transfer.nixl.agent import NixlAgent, NixlPeer, NixlRegistration
from bridge.transfer.nixl.reads import NixlTransfer

__all__ = ["NixlAgent", "NixlPeer", "NixlRegistration", "NixlTransfer"]
