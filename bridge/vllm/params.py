"""kv_transfer_params: what routers pass from the client to the prefiller, and from the prefiller to the decoder. Parsed as hostile.

The keys that stock routers look at are kept; everything that this connector believes stands under "kvbridge".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from bridge.codecs import declared
from bridge.codecs.errors import UnknownCodec
from bridge.handoff.errors import BadTicket
from bridge.handoff.ticket import Ticket
from bridge.vllm.errors import BadParameters
from bridge.wire.manifest import MAX_RANKS, MAX_REQUEST_ID_BYTES, MAX_TOKENS

KEY = "kvbridge"


@dataclass(frozen=True)
class PrefillOrder:
    """This engine is to prefill and offer. codec: what the request asks for, or None."""

    codec: str | None


@dataclass(frozen=True)
class DecodeOrder:
    """This engine is to fetch and decode. tp_size: ranks of the prefiller. tokens: prompt tokens that were prefilled."""

    ticket: Ticket
    tp_size: int
    tokens: int


def parse(params: object) -> PrefillOrder | DecodeOrder | None:
    """What a request's kv_transfer_params ask of this engine; None where they ask nothing of it. Raises BadParameters."""
    if params is None:
        return None
    if not isinstance(params, dict):
        raise BadParameters(f"kv_transfer_params are an object, not {type(params).__name__}")
    fetch, offer = params.get("do_remote_prefill"), params.get("do_remote_decode")
    for name, flag in (("do_remote_prefill", fetch), ("do_remote_decode", offer)):
        if flag is not None and not isinstance(flag, bool):
            raise BadParameters(f"{name} is true or false, not {type(flag).__name__}")
    if fetch and offer:
        raise BadParameters("do_remote_prefill and do_remote_decode cannot both be true")
    if not fetch and not offer:
        return None
    own = params.get(KEY)
    if offer:
        if own is not None and not isinstance(own, dict):
            raise BadParameters(f"{KEY} is an object, not {type(own).__name__}")
        return PrefillOrder(_codec((own or {}).get("codec")))
    if not isinstance(own, dict):
        raise BadParameters(f"kv_transfer_params without {KEY!r} come from another connector")
    try:
        ticket = Ticket.from_dict(own.get("ticket"))
    except BadTicket as error:
        raise BadParameters(error.detail) from None
    return DecodeOrder(ticket, _bounded(own, "tp_size", MAX_RANKS), _bounded(own, "tokens", MAX_TOKENS))


def _codec(name: object) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or len(name) > 64:
        raise BadParameters("a codec is a short name")
    try:
        return declared(name).name
    except UnknownCodec as error:
        raise BadParameters(error.detail, remedy=error.advice) from None


def _bounded(own: dict[Any, Any], name: str, limit: int) -> int:
    value = own.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise BadParameters(f"{name} is an integer from 1 to {limit}")
    return value


def wire_id(request_id: str) -> str:
    """The request's name in manifests and tickets: its own, or a digest of it where that is too long or cannot be written as UTF-8."""
    raw = request_id.encode("utf-8", "surrogatepass")
    plain = 1 <= len(raw) <= MAX_REQUEST_ID_BYTES and not any("\ud800" <= character <= "\udfff" for character in request_id)
    return request_id if plain else f"sha256-{hashlib.sha256(raw).hexdigest()}"


def for_decoder(ticket: Ticket, tp_size: int, tokens: int, engine_id: str) -> dict[str, Any]:
    """What the prefiller returns, for the router to pass on. It holds no address: the decoder's configuration has them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": ticket.request_id,
        "remote_host": ticket.peer,
        "remote_port": 0,
        "remote_block_ids": [[0]],
        "tp_size": tp_size,
        KEY: {"ticket": ticket.to_dict(), "tp_size": tp_size, "tokens": tokens},
    }
