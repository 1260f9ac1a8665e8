"""W11: seals that were damaged, cut from another manifest, or made with another key; and every bit of what is sealed."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

from bridge.wire.errors import BadSeal
from tests.attacks.attack import Attack, both
from tests.attacks.build import KEY, RawContainer, honest_mixed, honest_small

ERROR = BadSeal


def _other_key(raw: RawContainer) -> None:
    raw.seal = hmac.digest(bytes(32), raw.manifest()[:-32], "sha256")


def _no_key(raw: RawContainer) -> None:
    raw.seal = hashlib.sha256(raw.manifest()[:-32]).digest()


def _half(raw: RawContainer) -> None:
    raw.seal = raw.manifest()[-32:-16] + bytes(16)


def _other_manifest(raw: RawContainer) -> None:
    raw.seal = honest_mixed().manifest()[-32:]


def attacks() -> Iterator[Attack]:
    changes = {"another key": _other_key, "a plain hash": _no_key, "half a seal": _half, "another manifest's seal": _other_manifest}
    for name, change in changes.items():
        yield from both(name, change, BadSeal)
    yield from both("zeros", lambda raw: setattr(raw, "seal", bytes(32)), BadSeal)
    whole, manifest = bytearray(honest_small().pack()), len(honest_small().manifest())
    # Behind the header's first 24 bytes, whose own rules come first: every byte of body, seal and the file's key.
    for offset in [*range(64 + 24, 64 + manifest), *range(16, 48)]:
        whole[offset] ^= 1 << offset % 8
        yield Attack(f"one bit of byte {offset}", bytes(whole), BadSeal, False)
        whole[offset] ^= 1 << offset % 8
    yield from both(
        "key swapped behind the sealing", lambda raw: (setattr(raw, "seal", raw.manifest()[-32:]), setattr(raw, "key", KEY[::-1])), BadSeal
    )
