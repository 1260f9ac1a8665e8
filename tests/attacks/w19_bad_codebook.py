"""W19: code books that are not held here for these bits and this head dimension."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadCodebook
from tests.attacks.attack import Attack, both
from tests.attacks.build import ROTATED3, RawContainer, honest_rotated

ERROR = BadCodebook


def _digest(raw: RawContainer, digest: bytes) -> None:
    raw.codecs[0]["key_digest"] = digest


def _dimension(raw: RawContainer, head_dim: int) -> None:
    raw.groups[0]["head_dim"] = head_dim
    raw.tagged()


def _bits(raw: RawContainer) -> None:
    raw.codecs[0]["key_bits"] = 4
    raw.tagged()


def attacks() -> Iterator[Attack]:
    digest = ROTATED3["digest"]
    for name, other in (("one bit", bytes([digest[0] ^ 1]) + digest[1:]), ("reversed", digest[::-1]), ("ones", b"\xff" * 32)):
        yield from both(f"digest: {name}", lambda raw, d=other: _digest(raw, d), BadCodebook, base=honest_rotated)
    for head_dim in (16, 32, 128, 1024):
        yield from both(
            f"64's book for head dimension {head_dim}", lambda raw, d=head_dim: _dimension(raw, d), BadCodebook, base=honest_rotated
        )
    yield from both("3 bit book for 4 bits", _bits, BadCodebook, base=honest_rotated)
