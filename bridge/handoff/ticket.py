"""The ticket: what a prefiller gives the router and the router gives a decoder. It holds no address and no secret."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bridge.handoff.errors import BadTicket
from bridge.wire.manifest import MAX_RANKS, MAX_REQUEST_ID_BYTES

MAX_PEER_NAME = 128


def _utf8_size(text: str) -> int:
    """Bytes of the text; 0 where it cannot be written as UTF-8: JSON may hold lone surrogates, which no message or manifest can."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


@dataclass(frozen=True)
class Ticket:
    """Names one offered payload.

    peer: the prefiller's name in the decoder's configuration, which alone decides where to connect. lease, generation: as in the manifest.
    rank: of the prefiller's TP ranks; rank r listens on the configured port + r.
    """

    peer: str
    request_id: str
    lease: int
    generation: int
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a router's JSON. The lease is hexadecimal, since JSON numbers lose 64-bit integers."""
        return {**asdict(self), "lease": f"{self.lease:016x}"}

    @classmethod
    def from_dict(cls, data: object) -> Ticket:
        """Parses what a router passed on. Raises BadTicket for anything but a well-formed ticket; unknown keys are ignored."""
        if not isinstance(data, dict):
            raise BadTicket(f"a ticket is an object, not {type(data).__name__}")
        peer, request_id = data.get("peer"), data.get("request_id")
        lease, generation, rank = data.get("lease"), data.get("generation"), data.get("rank", 0)
        if not isinstance(peer, str) or not 1 <= len(peer) <= MAX_PEER_NAME:
            raise BadTicket("a ticket's peer is a name of 1 to 128 characters")
        if not isinstance(request_id, str) or not 1 <= _utf8_size(request_id) <= MAX_REQUEST_ID_BYTES:
            raise BadTicket(f"a ticket's request_id has 1 to {MAX_REQUEST_ID_BYTES} bytes of UTF-8")
        if not isinstance(lease, str) or len(lease) != 16 or any(c not in "0123456789abcdef" for c in lease):
            raise BadTicket("a ticket's lease has 16 hexadecimal digits")
        if not isinstance(generation, int) or isinstance(generation, bool) or not 0 <= generation < 2**32:
            raise BadTicket("a ticket's generation is an integer below 2**32")
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < MAX_RANKS:
            raise BadTicket(f"a ticket's rank is an integer below {MAX_RANKS}")
        return cls(peer, request_id, int(lease, 16), generation, rank)
