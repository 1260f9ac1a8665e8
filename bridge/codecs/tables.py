"""The scalar code books: vLLM 0.32's own float32 Lloyd-Max tables, bit for bit, since slots must be byte-equal to vLLM's.

They are not the exact Lloyd-Max values: vLLM integrates with a coarse trapezoid, which shifts the outer cells by 0.07 %. The tables for
N(0, 1/D) are antisymmetric; only their upper halves stand here, as the hexadecimal of big-endian float32.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bridge.wire.coding import codebook_digest

_UPPER_HALVES = {
    (64, 3): "3cfadcfb 3dc171fc 3e2bed53 3e899f54",
    (64, 4): "3c83828a 3d46b9ff 3da82948 3df1444a 3e20cd0c 3e4f16c0 3e846170 3eaec76e",
    (128, 3): "3cb16317 3d88c955 3df3243d 3e42a09f",
    (128, 4): "3c39fbae 3d0c8559 3d6dd0e1 3daa99f2 3de3682b 3e126f17 3e3b36e7 3e772cc4",
    (256, 3): "3c7adcfb 3d4171fc 3dabed53 3e099f54",
    (256, 4): "3c03828a 3cc6b9ff 3d282948 3d71444a 3da0cd0c 3dcf16c0 3e046170 3e2ec76e",
    (512, 3): "3c316317 3d08c955 3d73243d 3dc2a09f",
    (512, 4): "3bb9fbae 3c8c8559 3cedd0e1 3d2a99f2 3d63682b 3d926f17 3dbb36e7 3df72cc4",
}


@lru_cache
def centroids(head_dim: int, bits: int) -> np.ndarray:
    """fp32 [2**bits], ascending: the code book for this head dimension and width. Raises KeyError where there is none."""
    words = _UPPER_HALVES[head_dim, bits].split()
    upper = np.array([int(word, 16) for word in words], dtype=np.uint32).view(np.float32)
    table = np.concatenate([-upper[::-1], upper])
    table.flags.writeable = False
    return table


@lru_cache
def midpoints(head_dim: int, bits: int) -> np.ndarray:
    """fp32 [2**bits - 1]: the means of neighbouring entries; a coordinate's code is the number of midpoints that it reaches."""
    table = centroids(head_dim, bits)
    mids = (table[:-1] + table[1:]) / np.float32(2)
    mids.flags.writeable = False
    return mids


@lru_cache
def digest(head_dim: int, bits: int) -> bytes:
    """SHA-256 that names the table in a manifest. Raises KeyError where there is none."""
    return codebook_digest(centroids(head_dim, bits).astype("<f4").tobytes())


def head_dims() -> tuple[int, ...]:
    """The head dimensions that have code books."""
    return tuple(sorted({head_dim for head_dim, _ in _UPPER_HALVES}))
