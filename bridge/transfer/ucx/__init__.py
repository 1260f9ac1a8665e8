"""The ucx agent: UCX without NIXL, through ucxx."""

from bridge.transfer.ucx.agent import UcxAgent, UcxPeer, UcxRegistration, UcxTransfer

__all__ = ["UcxAgent", "UcxPeer", "UcxRegistration", "UcxTransfer"]
