"""What can go wrong with a transfer."""

from __future__ import annotations

from bridge.errors import KVBridgeError


class TransferError(KVBridgeError):
    """A transfer that did not arrive."""

    clause = "transfer"


class AgentUnavailable(TransferError):
    """The agent's package is missing or its back end refuses to start."""

    clause = "agent_unavailable"


class PeerUnreachable(TransferError):
    """The peer's agent does not answer, or its metadata is not understood."""

    clause = "peer_unreachable"
    remedy = "check that the prefiller runs and that its data port can be reached from here"


class TransferFailed(TransferError):
    """The agent reports an error for a transfer that had been started."""

    clause = "transfer_failed"
    remedy = "the request is recomputed or fails, as the engine is configured; if it repeats, check the link"


class TransferTimeout(TransferError):
    """A transfer did not finish within its bound. Its target memory stays quarantined until the agent is done with it."""

    clause = "transfer_timeout"
    remedy = "raise the transfer time-out if the link is that slow, or check the link"


class BadRange(TransferError):
    """A range outside the registered memory."""

    clause = "bad_range"
    remedy = "register the memory first, and read only inside what the peer described"


class RegistrationFailed(TransferError):
    """The library refuses to register memory."""

    clause = "registration"
    remedy = "stage in (pinned) host memory instead, and check the limit on locked memory (ulimit -l)"


class LinkTooSlow(TransferError):
    """A peer's link is slower than the configuration demands."""

    clause = "link_too_slow"
    remedy = "check which transport was chosen and why; or lower minimum_gbps, or set it to warn instead of refuse"


def said(error: BaseException) -> str:
    """What an exception that is not ours says, in a few words: never nothing."""
    return getattr(error, "strerror", None) or str(error).strip() or type(error).__name__


def no_thread(whose: str, error: RuntimeError) -> AgentUnavailable:
    """For Thread.start's RuntimeError."""
    return AgentUnavailable(f"no thread can be had for {whose}: {said(error)}", remedy="look at the limit on threads (ulimit -u)")
