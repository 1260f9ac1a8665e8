"""From what pages hold to what the wire carries, and back: nothing where both are the same coding, through fp32 where they differ."""

from __future__ import annotations

import numpy as np

from bridge.codecs import reference, tables
from bridge.codecs.errors import NotCarried
from bridge.wire.coding import Coding, CodingKind


def convert(
    codes: np.ndarray,
    scalars: np.ndarray,
    source: Coding,
    target: Coding,
    head_dim: int,
    source_scale: float = 1.0,
    target_scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of one coding as rows of another: u8 [..., code bytes] and u8 [..., scalar bytes], both times.

    The same bytes where coding and scale are the same. Raises NotCarried where either is opaque and they differ.
    """
    if source == target and source_scale == target_scale:
        return codes, scalars
    for coding in (source, target):
        if coding.kind in (CodingKind.OPAQUE, CodingKind.NONE):
            raise NotCarried(f"{source.kind.name} cannot become {target.kind.name}", remedy="both sides must keep these layers alike")
    return reference.encode(reference.decode(codes, scalars, source, head_dim, source_scale), target, target_scale)


def _entry_norms(codes: np.ndarray, coding: Coding, head_dim: int) -> np.ndarray:
    """fp32 [...]: the length of the code book's vector, as norm correction has it."""
    entries = tables.centroids(head_dim, coding.bits)[reference.unpack_bits(codes, coding.bits)]
    return np.sqrt(reference.sum_of_squares(entries) + np.float32(1e-16))


def unfold(codes: np.ndarray, scalars: np.ndarray, coding: Coding, head_dim: int) -> np.ndarray:
    """Norms that were divided by the code book vector's when stored, as raw norms: fp16 [..., 1] as u8 [..., 2], both times.

    Two roundings to fp16 may leave a norm one unit from the one before folding.
    """
    folded = np.ascontiguousarray(scalars).view("<f2").astype(np.float32)
    return reference.to_fp16(folded * _entry_norms(codes, coding, head_dim)[..., None])


def fold(codes: np.ndarray, scalars: np.ndarray, coding: Coding, head_dim: int) -> np.ndarray:
    """The inverse: vLLM's structure-of-arrays flavour (triton_turboquant_store.py of turboquant_soa)."""
    norms = np.ascontiguousarray(scalars).view("<f2").astype(np.float32)
    return reference.to_fp16(norms / _entry_norms(codes, coding, head_dim)[..., None])
