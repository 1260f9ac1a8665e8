"""Slots that vLLM 0.32's own store kernels wrote, reproduced byte for byte."""

import json
from pathlib import Path

import numpy as np
import pytest

from bridge.codecs import declared, reference, tables
from bridge.wire import Element

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vllm_turboquant_slots.json").read_text())
CASES = [(dim, preset) for dim in (64, 128, 256) for preset in VECTORS[f"D{dim}"]["slots"]]


def slots_of(head_dim: int, preset: str) -> np.ndarray:
    case = VECTORS[f"D{head_dim}"]
    codec = declared(preset).for_layer(head_dim, Element.BF16)
    parts = []
    for side, name in ((codec.key, "key_bf16le_hex"), (codec.value, "value_bf16le_hex")):
        raw = np.frombuffer(bytes.fromhex(case[name]), np.uint8).reshape(-1, 2 * head_dim)
        parts += reference.encode(reference.to_float(raw, Element.BF16), side)
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(("head_dim", "preset"), CASES)
def test_slots_equal_vllm(head_dim, preset):
    expected = VECTORS[f"D{head_dim}"]["slots"][preset]
    slots = slots_of(head_dim, preset)
    assert slots.shape[-1] == expected["slot_bytes"]
    for token, slot in enumerate(slots):
        assert slot.tobytes().hex() == expected[f"token{token}_hex"]


def test_every_case_is_there():
    assert len(CASES) == 12


@pytest.mark.parametrize("name", VECTORS["centroids_fp32le_hex"])
def test_code_books_equal_vllm(name):
    head_dim, bits = map(int, name[1:].split("_b"))
    assert tables.centroids(head_dim, bits).astype("<f4").tobytes().hex() == VECTORS["centroids_fp32le_hex"][name]
