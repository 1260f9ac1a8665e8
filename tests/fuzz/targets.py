"""What the coverage-guided fuzzer runs: one function of bytes for each reader of hostile input. Any exception from them is a finding.

The first byte of an input names its target. Seals are recomputed with the input's own key, or the fuzzer would never pass them.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from pathlib import Path

import msgspec

from bridge.handoff import messages
from bridge.handoff.errors import BadTicket, ProtocolError
from bridge.handoff.ticket import Ticket
from bridge.wire import open_sealed, seal
from bridge.wire.container import read_stream, verify_contents
from bridge.wire.errors import WireError
from tests.attacks import build
from tests.fuzz import judge
from tests.fuzz.plain import read_pieces, read_plainly

CORPUS = Path(__file__).with_name("corpus")


class Finding(Exception):
    """Something was accepted that must not be, or read as something else."""


def resealed(manifest: bytes, key: bytes) -> bytes:
    """The manifest with its own size in its header, and the right seal."""
    body = manifest[:12] + len(manifest).to_bytes(4, "little") + manifest[16:-32]
    return body + hmac.digest(key, body, "sha256")


def manifest_target(data: bytes) -> None:
    """open_sealed behind the seal: what is accepted means what its bytes say, and has no second encoding."""
    if len(data) < 56:
        data = data.ljust(56, b"\0")
    sealed = resealed(data, build.KEY)
    try:
        manifest = open_sealed(sealed, build.KEY)
    except WireError:
        return
    plain = read_pieces(build.KEY, sealed, b"")
    if judge.dump(manifest) != plain.dump():
        raise Finding(f"read as {judge.dump(manifest)}, the bytes say {plain.dump()}")
    if seal(manifest, build.KEY) != plain.known_manifest():
        raise Finding("two encodings of one meaning")


def container_target(data: bytes) -> None:
    """read_container and the check of its contents, the manifest's seal recomputed."""
    size = int.from_bytes(data[8:12], "little")
    if 56 <= size <= len(data) - 64:
        data = data[:64] + resealed(data[64 : 64 + size], data[16:48]) + data[64 + size :]
    try:
        manifest, key, payload = read_stream(judge.io.BytesIO(data), len(data))
        verify_contents(manifest, key, payload)
    except WireError:
        return
    plain = read_plainly(data)
    judge.check_meaning(manifest, plain)
    judge.check_encoding(manifest, plain, data)


def message_target(data: bytes) -> None:
    """One control message: refused, or within its bounds, so that it can be sent and read again."""
    try:
        message = messages.decode(data)
    except ProtocolError:
        return
    again = messages.decode(messages.encode(message))
    if msgspec.to_builtins(again) != msgspec.to_builtins(message):
        raise Finding(f"{message} is read as {again} when it is sent on")


def ticket_target(data: bytes) -> None:
    """A ticket from a router's JSON: refused, or usable in a message and equal to itself when it is passed on."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        ticket = Ticket.from_dict(value)
    except BadTicket:
        return
    messages.encode(messages.Refusal(0, ticket.peer, ticket.request_id, ""))
    messages.encode(messages.Commit(messages.u64(ticket.lease), ticket.generation))
    if Ticket.from_dict(json.loads(json.dumps(ticket.to_dict()))) != ticket:
        raise Finding(f"{ticket} does not survive JSON")


TARGETS: dict[str, Callable[[bytes], None]] = {
    "m": manifest_target,
    "c": container_target,
    "x": message_target,
    "t": ticket_target,
}


def one_input(data: bytes) -> None:
    """Runs the target that the first byte names; other bytes name one by their value."""
    if not data:
        return
    names = list(TARGETS)
    name = chr(data[0]) if chr(data[0]) in TARGETS else names[data[0] % len(names)]
    TARGETS[name](bytes(data[1:]))


def honest_inputs() -> dict[str, bytes]:
    """The corpus by file name: honest containers, manifests, control messages and tickets."""
    found: dict[str, bytes] = {}
    for name, make in build.HONEST.items():
        found[f"manifest-{name}"] = b"m" + make().manifest()
        if name in ("small", "newer"):
            found[f"container-{name}"] = b"c" + make().pack()
    lease, text = bytes(range(8)), "text"
    every = [
        messages.Hello(0, 1, "nixl"),
        messages.Welcome(0, 1, "nixl", b"metadata", bytes(8), 4096, "cpu", 0),
        messages.Claim(sequence=1, request_id="request-1", lease=lease, generation=1, reader=0, readers=2, model=bytes(32)),
        messages.Grant(1, build.honest_newer().manifest(), build.KEY, [messages.Slot(0, 4096), messages.Slot(1, 0)]),
        messages.Refusal(1, "unknown_lease", text, text),
        messages.Ready(lease, 1, messages.Slot(0, 4096)),
        messages.Taken(lease, 1, 0),
        messages.Commit(lease, 1),
        messages.Released(lease, 1),
        messages.Abandon(lease, 1, "cancelled", text),
        messages.Revoked(lease, 1, "lease_expired", text, text),
        messages.Ping(),
    ]
    for message in every:
        found[f"message-{type(message).__name__.lower()}"] = b"x" + messages.encode(message)
    found["ticket"] = b"t" + json.dumps(Ticket("prefill-0", "request-1", 2**64 - 1, 1).to_dict()).encode()
    found["ticket-surrogate"] = b't{"peer": "p", "request_id": "\\ud800", "lease": "0000000000000001", "generation": 0}'
    return found
