"""A model with sliding windows: vLLM keeps two KV cache groups, frees what has left a window, and gives each group blocks of its own."""

import pytest

from tests.vllm.models import WINDOW, prompt, windowed_model
from tests.vllm.rig import largest_difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.boots, pytest.mark.timeout(600)]

LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 129, 300, 900)


def both(**more):
    return {"model": str(windowed_model()), **more}


@pytest.mark.parametrize(("prefiller", "decoder"), [(32, 128), (64, 32)])
def test_windows(rig, prefiller, decoder):
    # Steps of 256 tokens: the longer prompts are packed while their windows move on.
    pair = rig.pair(both(block_size=prefiller, max_num_batched_tokens=256), both(block_size=decoder))
    for length in LENGTHS:
        tokens = prompt(length, seed=200 + length)
        handed_off, local = pair.handed_off(tokens), pair.local(tokens)
        assert handed_off.reason == "length"
        assert handed_off.tokens == local.tokens
        assert largest_difference(handed_off, local) < 1e-4
    pair.assert_empty()
    # The negative control: another prompt's cache must show.
    tokens, other = prompt(300, seed=230), prompt(300, seed=231)
    pair.dump(other, rig.folder)
    assert pair.oracle(tokens, "raw", rig.folder).tokens != pair.local(tokens).tokens


def test_windows_and_prefix_caches(rig):
    caching = both(enable_prefix_caching=True)
    pair = rig.pair(caching, caching)
    shared = prompt(500, seed=240)
    for tail in (1, 100, 300):
        tokens = shared + prompt(tail, seed=240 + tail)
        params = pair.prefill(tokens).params
        handed_off = pair.decoder.generate(tokens, 16, params)
        for engine in (pair.prefiller, pair.decoder):
            engine.order("reset_prefix_cache")
        local = pair.local(tokens)
        assert handed_off.tokens == local.tokens
        assert largest_difference(handed_off, local) < 1e-4
        pair.decoder.generate(shared, 1)  # so that the next one finds a prefix
    pair.assert_empty()
