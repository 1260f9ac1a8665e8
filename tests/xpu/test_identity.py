"""What digests.json claims: one payload of 100,000 vectors from every device, and where another device's bytes differ."""

from __future__ import annotations

import hashlib
import json

import pytest

from bridge.codecs import CODECS
from tests.xpu import identity

KEPT = json.loads(identity.DIGESTS.read_text())["100000"]
EXACT = ("interpreted", "xpu-emulated")
TIES = 24
"""Bytes that CUDA's shipped parameters may give differently: a code on the border of two, and eight bytes of its block's tag."""


def test_every_codec_has_a_digest_of_every_device() -> None:
    assert set(KEPT["payloads"]) == set(CODECS)
    assert set(KEPT["bytes that differ"]) == {*EXACT, "cuda"}
    for counted in KEPT["bytes that differ"].values():
        assert set(counted) == set(CODECS)


@pytest.mark.parametrize("device", EXACT)
def test_exact_devices_gave_the_references_bytes(device: str) -> None:
    assert set(KEPT["bytes that differ"][device].values()) == {0}


def test_cuda_differed_at_ties_of_rotated_keys_only() -> None:
    for codec, count in KEPT["bytes that differ"]["cuda"].items():
        assert count <= (TIES if codec.endswith("_nc") else 0), codec
    for where in KEPT.get("where", {}).get("cuda", {}).values():
        assert where["steps"] <= 1
        assert where["furthest"] < 1e-5


@pytest.mark.slow
def test_the_digests_are_those_of_the_code_as_it_is() -> None:
    """By the compiled CPU device, whose bytes are the reference's."""
    device, tokens = identity.device_of("cpu"), 100_000 // (2 * identity.HEADS)
    for codec, digest in KEPT["payloads"].items():
        assert hashlib.sha256(identity.packed(device, codec, tokens)[1].tobytes()).hexdigest() == digest, codec


@pytest.mark.parametrize("codec", ["turboquant_4bit_nc", "turboquant_3bit_nc"])
def test_what_differs_is_named(codec: str) -> None:
    """One code of a key raised by one: found again, with the distance of its element from the border that it should have passed."""
    manifest, payload = identity.packed(identity.device_of("cpu-reference"), codec, 40)
    assert str(identity.compared(manifest, payload, payload)) == "identical"
    changed = payload.copy()
    lowest = next(at for at in range(256) if payload[at] & 7 < 7)
    changed[lowest] += 1
    apart = identity.compared(manifest, changed, payload)
    assert (apart.bytes, apart.codes, apart.steps, apart.scalars, apart.tags) == (1, 1, 1, 0, 0)
    assert 1e-4 < apart.furthest < 1
    changed = payload.copy()
    changed[-32] ^= 1  # three blocks' tags and their padding end the payload
    assert identity.compared(manifest, changed, payload) == identity.Apart(bytes=1, tags=1)
