"""Blocks of every size, element types and codecs: decoding after a hand-off equals decoding from what the reference codec leaves.

The oracle (see hooks.py) is the same decoder engine, with the prefiller's own KV put through the reference's encoder and decoder and
written by plain indexing. Both runs differ in nothing but how the KV came into the pages, so tokens and log-probabilities must be equal to
the last bit, lossy or not, whatever the element types.
"""

import pytest

from bridge.codecs import CODECS
from tests.vllm.models import prompt
from tests.vllm.rig import agreeing, largest_difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = prompt(300, seed=51)
SIZES = (32, 64, 128)
PAIRS = [(p, d) for number, p in enumerate(SIZES) for d in (SIZES if number % 2 == 0 else SIZES[::-1])]
"""In an order in which each pair shares an engine with the one before."""


def check(pair, folder, codec):
    """Returns how many tokens agree with a decoder that prefilled by itself."""
    handed_off = pair.handed_off(TOKENS, 16, codec)
    oracle = pair.oracle(TOKENS, codec, folder)
    assert handed_off.reason == "length"
    assert handed_off.tokens == oracle.tokens
    assert largest_difference(handed_off, oracle) == 0.0
    return handed_off


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_each_codec_per_request(rig, tmp_path, codec, capsys):
    pair = rig.pair()
    pair.dump(TOKENS, tmp_path)
    handed_off = check(pair, tmp_path, codec)
    local = pair.local(TOKENS, 16)
    with capsys.disabled():
        print(f"\n{codec}: {agreeing(handed_off, local)} of 16 tokens as without a codec, on a model that forgives nothing")
    if codec == "raw":
        assert handed_off.tokens == local.tokens
    pair.assert_empty()


@pytest.mark.boots
@pytest.mark.parametrize(("prefiller", "decoder"), PAIRS)
def test_block_sizes(rig, tmp_path, prefiller, decoder):
    pair = rig.pair({"block_size": prefiller}, {"block_size": decoder})
    pair.dump(TOKENS, tmp_path)
    raw = check(pair, tmp_path, "raw")
    local = pair.local(TOKENS, 16)
    assert raw.tokens == local.tokens
    assert largest_difference(raw, local) < 1e-4
    check(pair, tmp_path, "turboquant_k3v4_nc")
    pair.assert_empty()


def element_types(rig, tmp_path, capsys, prefiller, decoder):
    pair = rig.pair(prefiller, decoder)
    pair.dump(TOKENS, tmp_path)
    local = pair.local(TOKENS, 16)
    said = []
    for codec in sorted(CODECS):
        handed_off = check(pair, tmp_path, codec)
        said.append(f"{codec} {agreeing(handed_off, local)}")
    with capsys.disabled():
        # A local run computes 300 tokens at once in the decoder's own type; a hand-off brings the prefiller's values and computes one.
        print(f"\n{prefiller} -> {decoder}: leading tokens (of 16) that agree with a local prefill: {', '.join(said)}")
    pair.assert_empty()


@pytest.mark.boots
@pytest.mark.parametrize(
    ("prefiller", "decoder"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float16", "bfloat16")]
)
def test_element_types(rig, tmp_path, capsys, prefiller, decoder):
    element_types(rig, tmp_path, capsys, {"dtype": prefiller}, {"dtype": decoder})


@pytest.mark.boots
@pytest.mark.avx512
@pytest.mark.parametrize("prefiller", ["float32", "bfloat16"])
def test_into_an_fp8_cache(rig, tmp_path, capsys, prefiller):
    element_types(rig, tmp_path, capsys, {"dtype": prefiller}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"})


@pytest.mark.boots
@pytest.mark.avx512
def test_between_fp8_caches(rig, tmp_path):
    fp8 = {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}
    pair = rig.pair(fp8, fp8)
    handed_off, local = pair.handed_off(TOKENS, 16), pair.local(TOKENS, 16)
    assert handed_off.tokens == local.tokens
