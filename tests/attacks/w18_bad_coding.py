"""W18: codings of unknown kind, whose parameters contradict each other, or which their group cannot have."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadCoding
from tests.attacks.attack import Attack, both
from tests.attacks.build import AFFINE4, BF16, CODECS, FP8, INT8, NO_DIGEST, NO_SIDE, OPAQUE16, ROTATED3, codec, coding, honest_mixed

ERROR = BadCoding

SIDES = {
    "kind 7": {**BF16, "kind": 7},
    "kind 255": {**BF16, "kind": 255},
    "element 5": {**BF16, "element": 5},
    "rotation 2": {**ROTATED3, "rotation": 2},
    "raw of 8 bits": {**BF16, "bits": 8},
    "raw of no element": {**BF16, "element": 0},
    "raw e4m3": coding(1, 8, 4),
    "raw of 32 bit bf16": {**BF16, "bits": 32},
    "rotated raw": {**BF16, "rotation": 1},
    "raw with a digest": {**BF16, "digest": b"\1" * 32},
    "raw with a row size": {**BF16, "row_bytes": 32},
    "fp8 of 4 bits": {**FP8, "bits": 4},
    "fp8 of no element": {**FP8, "element": 0},
    "code book not rotated": {**ROTATED3, "rotation": 0},
    "code book without a digest": {**ROTATED3, "digest": NO_DIGEST},
    "code book of 5 bits": {**ROTATED3, "bits": 5},
    "affine of 0 bits": {**AFFINE4, "bits": 0},
    "affine of 255 bits": {**AFFINE4, "bits": 255},
    "rotated affine": {**AFFINE4, "rotation": 1},
    "int8 of 7 bits": {**INT8, "bits": 7},
    "opaque without a meaning": {**OPAQUE16, "digest": NO_DIGEST},
    "opaque without a size": {**OPAQUE16, "row_bytes": 0},
    "opaque of 1 MiB + 1": {**OPAQUE16, "row_bytes": (1 << 20) + 1},
    "opaque of 4 GiB": {**OPAQUE16, "row_bytes": 0xFFFFFFFF},
    "opaque of 8 bits": {**OPAQUE16, "bits": 8},
    "nothing of 8 bits": {**NO_SIDE, "bits": 8},
}


def attacks() -> Iterator[Attack]:
    for name, side in SIDES.items():
        for which, row in (("key", codec(side, BF16)), ("value", codec(BF16, side))):
            yield from both(f"{name} as {which}", lambda raw, r=row: setattr(raw.section(CODECS), "rows", [r]), BadCoding)
    yield from both("no key side", lambda raw: setattr(raw.section(CODECS), "rows", [codec(NO_SIDE, BF16)]), BadCoding)
    yield from both("no sides", lambda raw: setattr(raw.section(CODECS), "rows", [codec(NO_SIDE, NO_SIDE)]), BadCoding)
    yield from both("no value side", lambda raw: setattr(raw.section(CODECS), "rows", [codec(BF16, NO_SIDE)]), BadCoding)
    yield from both("no codec", lambda raw: setattr(raw.section(CODECS), "rows", []), BadCoding)
    yield from both("source 5", lambda raw: raw.layers[0].update(source=5), BadCoding)
    yield from both("source 65535", lambda raw: raw.layers[0].update(source=65535), BadCoding)
    yield from both("a latent with a value side", lambda raw: raw.codecs.__setitem__(2, codec(BF16, BF16)), BadCoding, base=honest_mixed)
    yield from both("a state in bf16", lambda raw: raw.codecs.__setitem__(3, codec(BF16, NO_SIDE)), BadCoding, base=honest_mixed)
    row = codec(OPAQUE16, BF16)
    yield from both("a state with a value side in bf16", lambda raw: raw.codecs.__setitem__(3, row), BadCoding, base=honest_mixed)
