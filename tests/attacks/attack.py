"""What an attack is, and how it is run: hostile bytes, the one clause that refuses them, and how much memory that may take."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bridge.wire import Manifest
from bridge.wire.container import read_stream, verify_contents
from bridge.wire.errors import BadSeal, WireError
from tests.attacks.build import RawContainer, honest_small

ALLOWANCE = 1 << 20
"""Bytes that a refusal may take at its peak, beyond three times the attack's own size."""

Change = Callable[[RawContainer], object]


@dataclass(frozen=True)
class Attack:
    """resealed: whether the attacker holds the key, so that clauses behind the seal are reached."""

    name: str
    data: bytes
    refusal: type[WireError]
    resealed: bool


def both(
    name: str, change: Change, error: type[WireError], *, base: Callable[[], RawContainer] = honest_small, left: type[WireError] = BadSeal
) -> Iterator[Attack]:
    """The same change twice: under the honest container's seal, refused by `left`, and re-sealed, refused by `error`."""
    raw = base()
    seal = raw.manifest()[-32:]
    change(raw)
    resealed = raw.pack()
    if raw.seal is None:
        raw.seal = seal
    yield Attack(f"{name}, left", raw.pack(), left, False)
    yield Attack(f"{name}, resealed", resealed, error, True)


def read(data: bytes) -> Manifest:
    """Reads a container and checks everything in it. Raises a WireError."""
    manifest, key, payload = read_stream(io.BytesIO(data), len(data))
    verify_contents(manifest, key, payload)
    return manifest


def refusal(data: bytes) -> WireError | None:
    """The error by which `data` is refused, None where it is accepted. Anything that is not a WireError is raised."""
    try:
        read(data)
    except WireError as error:
        return error
    return None


def peak_of(data: bytes) -> tuple[WireError | None, int]:
    """The refusal, and the most bytes that Python held at a time while it came to it."""
    tracemalloc.start()
    try:
        error = refusal(data)
        return error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
