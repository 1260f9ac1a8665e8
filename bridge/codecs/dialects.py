"""Bytes of other writers: recognised by magic, name or their rotation's seeds, and refused in a sentence that says what they are.

"TurboQuant" names no byte format: several writers use one name for different bytes, and one read as another gives garbage without an error.
What has an exact rule needs no refusal: vLLM's structure-of-arrays slots are read as `pages.SlotPages.regions`, and `e4b15_as_e4m3` here
converts its E4B15 keys, for tools; devices refuse the cards that write them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bridge.codecs.errors import NotCarried, UnknownCodec


class ForeignDialect(UnknownCodec):
    """Bytes of another writer, whose rule is not this format's."""

    clause = "foreign_dialect"
    remedy = "let the engine keep its cache in bf16, fp8 or vLLM's TurboQuant slots, and choose the codec here"


@dataclass(frozen=True)
class Dialect:
    """What another writer's bytes are. sentence: for people. names: spellings in configurations. magic: first bytes of its files."""

    name: str
    sentence: str
    names: tuple[str, ...]
    magic: bytes = b""

    def refusal(self) -> ForeignDialect:
        return ForeignDialect(self.sentence)


DIALECTS = (
    Dialect(
        "lmcache-turbo-quant-serde",
        "these are TQ01 bytes of lmcache-turbo-quant-serde: a random (Haar) rotation, keys and values both quantised, a tensor a record, "
        "without a checksum",
        ("lmcache-turbo-quant-serde", "lmcache_turbo_quant_serde", "tqai", "tq01"),
        b"TQ01",
    ),
    Dialect(
        "kvblockd",
        "these are KVB1 bytes of kvblockd, a block store's own format, which shares nothing with .kvb files but the letters",
        ("kvblockd", "kvb1"),
        b"KVB1",
    ),
    Dialect(
        "lmcache",
        "these are TurboQuant bytes of LMCache's serializer: a Hadamard rotation with random signs, of seed 42 + 1337 * layer, and no "
        "header, so that nothing but the seeds tells them from vLLM's",
        ("lmcache", "lmcache_turboquant", "lmcache-turboquant"),
    ),
    Dialect(
        "turbo-attn",
        "these are rows of turbo-attn (tkv): keys and values both rotated and coded with code books fitted to the model, norms as bf16",
        ("turbo-attn", "turbo_attn", "tkv"),
    ),
    Dialect(
        "fused_turboquant",
        "these are rows of fused_turboquant: a Hadamard rotation with random signs for keys and values, norms as fp32",
        ("fused_turboquant", "fused-turboquant"),
    ),
    Dialect(
        "ultraquant",
        "these are UltraQuant rows: 4-bit floats (E2M1) with one power-of-two scale for 32 elements",
        ("ultraquant", "ultraquant_4bit"),
    ),
)


def by_magic(data: bytes) -> Dialect | None:
    """The writer of a file that begins with these bytes (eight suffice), if it is a known other one."""
    return next((dialect for dialect in DIALECTS if dialect.magic and data.startswith(dialect.magic)), None)


def by_name(name: str) -> Dialect | None:
    """The writer that a codec, cache type or serializer of this name belongs to, if it is a known other one."""
    return next((dialect for dialect in DIALECTS if name.lower() in dialect.names), None)


def by_seeds(seeds: Sequence[int]) -> Dialect | None:
    """The writer whose layers, from layer 0 on, rotate with these seeds: LMCache's rule is 42 + 1337 * layer."""
    follows = len(seeds) > 0 and all(seed == 42 + 1337 * layer for layer, seed in enumerate(seeds))
    return by_name("lmcache") if follows else None


def check_rotation(seeds: Sequence[int] | None) -> None:
    """Raises ForeignDialect unless the engine's rotation has no random signs (seeds None), as this format's has."""
    if seeds is None:
        return
    known = by_seeds(seeds)
    if known is not None:
        raise known.refusal()
    raise ForeignDialect("these slots were rotated with random signs of unknown seeds, and this format's rotation has none")


# vLLM's keys of turboquant_k8v4 on NVIDIA devices of compute capability below 8.9.

E4B15_SCALE = 2.0**-8
"""E4B15 has E4M3FN's bits with an exponent bias of 15 instead of 7: the same byte is a value 256 times smaller."""


def writes_e4b15(capability: tuple[int, int] | None) -> bool:
    """Whether vLLM keeps fp8 keys as E4B15 on a device of this CUDA compute capability; None for devices that are not NVIDIA's.

    Source: vLLM 0.32, triton_turboquant_decode.py, _use_fp8_e4b15.
    """
    return capability is not None and capability < (8, 9)


def e4b15_as_e4m3(codes: np.ndarray) -> tuple[np.ndarray, float]:
    """E4B15 codes (u8) as E4M3FN codes and the scale that a decoded element is multiplied with: the same bytes, and 2**-8; exact.

    Raises NotCarried where a code is 0x7f or 0xff: +-1.875 there, NaN in E4M3FN.
    """
    lost = int(np.count_nonzero((codes & 0x7F) == 0x7F))
    if lost:
        raise NotCarried(
            f"{lost} E4B15 codes are +-1.875, which E4M3FN does not have at that place",
            remedy="such keys were clipped when they were stored; use a device of compute capability 8.9 or higher, or fp8_e4m3",
        )
    return codes, E4B15_SCALE


def e4m3_as_e4b15(codes: np.ndarray, scale: float) -> np.ndarray:
    """The inverse: E4M3FN codes of this scale as E4B15 codes. Raises NotCarried unless the scale is 2**-8 and no code is NaN."""
    if scale != E4B15_SCALE:
        raise NotCarried(
            f"fp8 codes of scale {scale} are not E4B15's, whose elements are 256 times smaller and end at 1.875",
            remedy="land this payload in bf16 pages on devices of compute capability below 8.9",
        )
    if bool(np.any((codes & 0x7F) == 0x7F)):
        raise NotCarried("E4B15 has no NaN", remedy="the payload holds keys that are not numbers; recompute the request")
    return codes
