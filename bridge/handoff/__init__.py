"""The hand-off: a prefiller offers a request's KV cache, a decoder fetches, verifies and commits it."""

from bridge.handoff.bounds import Bounds
from bridge.handoff.decoder import Decoder, Fetch, Received, Target
from bridge.handoff.identity import Identity, PeerConfig, create_identity
from bridge.handoff.lease import Mode
from bridge.handoff.offer import Offer
from bridge.handoff.prefiller import Prefiller
from bridge.handoff.ticket import Ticket

__all__ = [
    "Bounds",
    "Decoder",
    "Fetch",
    "Identity",
    "Mode",
    "Offer",
    "PeerConfig",
    "Prefiller",
    "Received",
    "Target",
    "Ticket",
    "create_identity",
]
