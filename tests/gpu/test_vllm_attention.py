"""The store of the vLLM attention back end against the reference encoder, its planes, its refusals; and the back end inside vLLM's classes.

On a CUDA device where there is one, else under Triton's interpreter, which must be chosen before triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from backends.cuda.vllm_attention import plugin
from backends.cuda.vllm_attention.planes import planes_of, slots_of
from backends.cuda.vllm_attention.refusals import UnsupportedAttention, check_engine, check_layer
from backends.cuda.vllm_attention.store import store
from backends.kernels.attend.pages import PRESETS, slot_bytes
from bridge.codecs import declared, reference
from bridge.wire.coding import Element
from tests.vllm.engine import vllm_python

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(__file__).parents[2]
DTYPES = {torch.bfloat16: Element.BF16, torch.float16: Element.FP16}


def inputs(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as views of one projection, as an engine has them: rows are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(tokens, 2 * heads + 3, dim, generator=generator) * torch.rand(tokens, 2 * heads + 3, 1, generator=generator) * 9
    both[0, 0] = 0  # an all-zero key
    both[0, heads] = 2.5  # a constant value
    both = both.to(dtype).to(DEVICE)
    return both[:, :heads], both[:, heads : 2 * heads]


def reference_slots(key: torch.Tensor, value: torch.Tensor, preset: str) -> torch.Tensor:
    """What the reference encoder makes of the rows: uint8 [tokens, heads, slot bytes]."""
    codec = declared(preset).for_layer(key.shape[2], DTYPES[key.dtype])
    parts = []
    for side, coding in ((key, codec.key), (value, codec.value)):
        codes, scalars = reference.encode(side.float().cpu().numpy(), coding)
        parts += [codes, scalars]
    return torch.from_numpy(np.concatenate(parts, -1))


def cache_of(pages: int, page_tokens: int, heads: int, slot: int) -> torch.Tensor:
    """Poisoned, with room between pages as where layers of different sizes share an allocation."""
    size = page_tokens * heads * slot
    raw = torch.full((pages, size + 64), 0xCD, dtype=torch.uint8, device=DEVICE)
    return raw.as_strided((pages, page_tokens, heads, slot), (size + 64, heads * slot, slot, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "page_tokens", "dim", "dtype", "rows_of_program"), [(3, 16, 64, torch.float16, 1), (2, 32, 128, torch.bfloat16, 4)]
)
@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("layout", ["slots", "planes"])
def test_store_writes_the_references_bytes(layout, preset, heads, page_tokens, dim, dtype, rows_of_program):
    tokens, slot = 7, slot_bytes(preset, dim)
    key, value = inputs(tokens, heads, dim, dtype)
    cache = cache_of(4, page_tokens, heads, slot)
    places = torch.randperm(4 * page_tokens, generator=torch.Generator().manual_seed(1))[:tokens]
    places[5] = -1  # a padded row
    store(key, value, cache, places.to(DEVICE), preset, layout, rows_of_program)

    want = cache_of(4, page_tokens, heads, slot).cpu()
    rows = reference_slots(key, value, preset)
    for row, place in zip(rows, places.tolist(), strict=True):
        if place >= 0:
            want[place // page_tokens, place % page_tokens] = row
    got = cache.cpu()
    if layout == "planes":
        got = slots_of(got, torch.arange(4), preset, dim)
    assert torch.equal(got, want), int((got != want).sum())
    spare = cache.as_strided((4, 64), (cache.stride(0), 1), page_tokens * heads * slot)
    assert bool((spare == 0xCD).all())


@pytest.mark.slow
def test_planes_are_the_wires_blocks():
    """A page of planes holds, head by head, the blocks of SlotCodec.planes."""
    preset, dim, heads, tokens = "turboquant_3bit_nc", 64, 2, 32
    codec = declared(preset).for_layer(dim, Element.FP16)
    slot = slot_bytes(preset, dim)
    cache = cache_of(1, tokens, heads, slot)
    key, value = inputs(tokens, heads, dim, torch.float16)
    store(key, value, cache, torch.arange(tokens, device=DEVICE), preset, "planes", 4)
    rows = reference_slots(key, value, preset).numpy()
    k, v, n, pair = codec.planes(dim)
    blocks = planes_of(cache).cpu().numpy().reshape(heads, tokens // 16, 16 * slot)
    for head in range(heads):
        for t in range(tokens):
            at = [blocks[head, t // 16, p.offset + t % 16 * p.row_bytes :][: p.row_bytes] for p in (k, n, v, pair)]
            assert np.array_equal(np.concatenate(at), rows[t, head])


@pytest.mark.parametrize("change", ["dtype", "cache", "places", "shape"])
def test_store_refuses(change):
    key, value = inputs(4, 2, 64, torch.float16)
    cache, places = cache_of(2, 16, 2, slot_bytes("turboquant_4bit_nc", 64)), torch.arange(4, device=DEVICE)
    if change == "dtype":
        key, value = key.float(), value.float()
    elif change == "cache":
        cache = cache[..., :-2]
    elif change == "places":
        places = places[:3]
    else:
        value = value[:, :1]
    with pytest.raises(ValueError, match=r"needed|does not hold|must"):
        store(key, value, cache, places, "turboquant_4bit_nc", "slots")


GOOD = ("turboquant_4bit_nc", "planes", 128, 4, 32)


@pytest.mark.parametrize(
    ("shape", "options", "word"),
    [
        (("auto", "slots", 128, 4, 32), {}, "preset"),
        (("turboquant_4bit_nc", "planes", 96, 4, 32), {}, "head dim 96"),
        (("turboquant_4bit_nc", "planes", 128, 32, 32), {}, "32 kv heads"),
        (("turboquant_4bit_nc", "planes", 128, 1, 32), {}, "32 query heads per kv head"),
        (("turboquant_4bit_nc", "planes", 128, 5, 32), {}, "no multiple"),
        (("turboquant_4bit_nc", "slots", 256, 12, 192), {}, "shared memory"),
        (GOOD, {"alibi": True}, "ALiBi"),
        (GOOD, {"shared": True}, "another layer"),
        (GOOD, {"softcap": -1.0}, "negative"),
        (GOOD, {"attention_type": "encoder_only"}, "encoder_only"),
    ],
)
def test_layers_are_refused_by_name(shape, options, word):
    check_layer(*GOOD)
    with pytest.raises(UnsupportedAttention, match=word) as caught:
        check_layer(*shape, **options)
    assert "KVBRIDGE_ATTENTION" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "word"), [({"speculative": True}, "speculative"), ({"ubatching": True}, "overlap"), ({"sequences": 5000}, "5000")]
)
def test_engines_are_refused_by_name(setting, word):
    check_engine(sequences=4096)
    with pytest.raises(UnsupportedAttention, match=word):
        check_engine(**setting)


def test_the_plugin_does_nothing_unless_asked(monkeypatch):
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    plugin.register()  # and so imports no vLLM, which is not in this environment
    monkeypatch.setenv(plugin.SWITCH, "tiles")
    with pytest.raises(UnsupportedAttention, match="slots or planes"):
        plugin.register()


def test_vllm_is_told_of_the_plugin():
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert [EntryPoint(name, value, "vllm.general_plugins").load() for name, value in names.items()] == [plugin.register]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["slots", "planes"])
def test_inside_vllm(layout, tmp_path):
    """vLLM's own classes on the CPU: what it asks the back end, metadata, and one layer's forward against float64 attention."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVBRIDGE_ATTENTION": layout, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [str(vllm_python()), "-m", "tests.gpu.vllm_process", str(tmp_path / "out.json")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["class"] == {"slots": "SlotsBackend", "planes": "PlanesBackend"}[layout]
    assert found["refused"] == {"head_size": ["head_size not supported"], "capability": ["compute capability not supported"]}
    assert bool(found["connector"]) == (layout == "planes")
    assert found["content_bytes"] == 134
    assert found["speculative"].startswith("speculative decoding")
    assert set(found["errors"]) == {"decode", "first chunks", "mixed", "mixed, window", "padded decode"}
    for name, error in found["errors"].items():
        assert error < 4e-3, (name, error)
