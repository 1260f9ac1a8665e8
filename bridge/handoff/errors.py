"""What can go wrong with a hand-off. Each type is also a counter's name and a clause on the control channel."""

from __future__ import annotations

import asyncio
import re

from bridge.errors import KVBridgeError


class HandoffError(KVBridgeError):
    """A hand-off that did not happen; nothing was committed, and the engine may recompute."""

    clause = "handoff"


class PeerLost(HandoffError):
    """The peer closed the control channel, died, or was silent for too long."""

    clause = "peer_lost"
    remedy = "the request fails or is recomputed; the next one connects again by itself. If it repeats, look at the peer"


class PeerUnknown(HandoffError):
    """A peer that the configuration does not name, or whose certificate is not the configured one."""

    clause = "peer_unknown"
    remedy = "name the peer, its address and its certificate in the configuration of this host"


class BadIdentity(HandoffError):
    """A certificate or key file that is missing, unreadable, or not what it should be."""

    clause = "bad_identity"
    remedy = "make both with `kvbridge identity NAME`, and give each host its peers' .crt files"


class CannotConnect(HandoffError):
    """The peer's control port does not answer, or the TLS handshake failed."""

    clause = "cannot_connect"
    remedy = "check that it runs, its address and port, and that each side's certificate is configured on the other"


class CannotListen(HandoffError):
    """The control port cannot be opened."""

    clause = "cannot_listen"
    remedy = "choose another port or address"


class ProtocolError(HandoffError):
    """A control message that is malformed, too large, or out of turn."""

    clause = "protocol"
    remedy = "compare the versions of both sides"


class BadBounds(HandoffError):
    """Bounds that no hand-off can keep."""

    clause = "bad_bounds"
    remedy = "give finite seconds greater than 0, and a heartbeat shorter than the silence"


class HandoffTimeout(HandoffError):
    """A step of the hand-off took longer than its bound."""

    clause = "timeout"
    remedy = "the request fails or is recomputed; raise the bound if the link or the peer is that slow"


class StagingFull(HandoffError):
    """The staging budget has no room for this request now, or could never have it."""

    clause = "staging_full"
    remedy = "raise the staging budget, lower the chunk size, or hold the engine's pages and offer again later"


class UnknownLease(HandoffError):
    """The prefiller has no such lease: never offered, already freed, or offered by an earlier process."""

    clause = "unknown_lease"
    remedy = "prefill again"


class StaleGeneration(HandoffError):
    """The lease was offered anew after this ticket was made."""

    clause = "stale_generation"
    remedy = "use the newest ticket of this request"


class LeaseTaken(HandoffError):
    """Another decoder has claimed this lease."""

    clause = "lease_taken"
    remedy = "send each ticket to one decoder"


class LeaseExpired(HandoffError):
    """No decoder finished within the lease's time."""

    clause = "lease_expired"
    remedy = "raise the lease time if decoders are called that late"


class Cancelled(HandoffError):
    """One of the engines gave the request up."""

    clause = "cancelled"


class PackingFailed(HandoffError):
    """The device could not pack a chunk, or the pages are not what the offer said."""

    clause = "packing_failed"
    remedy = "the request fails or is recomputed; look at the prefiller's log for the device's error"


class Unexpected(HandoffError):
    """A device or a library failed in a way that has no type of its own."""

    clause = "unexpected"
    remedy = "the request fails or is recomputed; look for the cause that the log shows below this error"


class AlreadyFetched(HandoffError):
    """The ticket is in use here at this moment."""

    clause = "already_fetched"
    remedy = "a ticket serves one sequence once: send one prompt a request, with n 1"


class Incompatible(HandoffError):
    """Both sides are well, but this payload does not fit this decoder."""

    clause = "incompatible"


class ModelDiffers(Incompatible):
    """The two sides hold different models."""

    clause = "model_differs"
    remedy = "serve the same checkpoint on both sides, with the same compare_weights and --hf-overrides"


class LayersMissing(Incompatible):
    """The payload lacks a layer or kv head that this decoder needs."""

    clause = "layers_missing"
    remedy = "compare both sides' TP and PP settings"


class HeadsDiffer(Incompatible):
    """A layer's head count or head dimension is not the decoder's."""

    clause = "heads_differ"
    remedy = "serve the same checkpoint on both sides"


class TokensMissing(Incompatible):
    """The payload's token range does not cover what the decoder asked for."""

    clause = "tokens_missing"
    remedy = "prefill the whole prompt before handing it off"


class OpaqueDiffers(Incompatible):
    """Opaque rows or a state whose meaning or size is not the decoder's."""

    clause = "opaque_differs"
    remedy = "run the same engine version and TP size on both sides"


class ContentDiffers(Incompatible):
    """The payload holds the KV of other tokens than the decoder expects."""

    clause = "content_differs"
    remedy = "send the same prompt, and deploy the same LoRA adapters, to both sides"


class LossyPayload(Incompatible):
    """A lossy codec changed the payload, and this decoder keeps only what none has changed."""

    clause = "lossy_payload"
    remedy = "ask for the codec raw, switch the decoder's prefix cache off, or consent: with vLLM, set lossy_prefix_cache to true"


class StagingDiffers(HandoffError):
    """The prefiller stages in memory of a kind that this decoder has none of."""

    clause = "staging_differs"
    remedy = 'give the prefiller staging="host"'


class BadTicket(HandoffError):
    """A ticket that is malformed. Tickets travel through routers and are believed only after parsing."""

    clause = "bad_ticket"
    remedy = "pass the prefiller's ticket on unchanged"


_CLAUSE = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Refused(HandoffError):
    """The peer refused. `clause` is the peer's clause, so a refusal is counted under its own name on both sides."""

    def __init__(self, clause: str, detail: str, remedy: str, peer: str) -> None:
        super().__init__(f"{peer} refused: {detail}", remedy=remedy)
        # It becomes a counter's name and a metric's label, and the peer chose it.
        self.clause = clause if _CLAUSE.fullmatch(clause) else "other"  # type: ignore[misc]


def as_failure(error: BaseException) -> KVBridgeError:
    """The typed failure that any exception of a hand-off is counted, told and raised as."""
    if isinstance(error, KVBridgeError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Cancelled("the decoder's engine gave the request up")
    return Unexpected(f"{type(error).__name__}: {error}"[:1000])
