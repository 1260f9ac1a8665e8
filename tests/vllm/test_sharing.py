"""Several requests at once, the decoder's prefix cache, prefills in chunks, preemption."""

import pytest

from tests.vllm.models import prompt
from tests.vllm.rig import largest_difference, offer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CACHING = {"enable_prefix_caching": True}
CONSENT = {"enable_prefix_caching": True, "extra": {"lossy_prefix_cache": True}}
STEPWISE = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


def test_several_at_once(rig):
    pair = rig.pair()
    prompts = [prompt(40 + 97 * n, seed=60 + n) for n in range(8)]
    names = [pair.prefiller.add(tokens, 1, offer("raw" if n % 2 else None)) for n, tokens in enumerate(prompts)]
    params = [pair.prefiller.wait(name).params for name in names]
    pair.decoder.rpc("poison")
    names = [pair.decoder.add(tokens, 8, one) for tokens, one in zip(prompts, params, strict=True)]
    found = [pair.decoder.wait(name) for name in names]
    local = [pair.local(tokens, 8) for tokens in prompts]
    assert [one.tokens for one in found] == [one.tokens for one in local]
    assert max(map(largest_difference, found, local)) < 1e-4
    pair.assert_empty()


@pytest.mark.boots
def test_a_prefill_in_chunks(rig):
    pair, tokens = rig.pair(STEPWISE), prompt(300, seed=70)
    handed_off, local = pair.handed_off(tokens), pair.local(tokens)
    assert handed_off.tokens == local.tokens
    assert largest_difference(handed_off, local) < 1e-4
    # Packed as it was computed: the first chunk of 128 tokens after two steps of 64.
    pair.prefiller.order("pause")
    name = pair.prefiller.add(tokens, 1, offer())
    before = pair.prefiller.counters()["prefiller_packed_bytes"]
    pair.prefiller.order("step", count=2)
    assert pair.prefiller.counters()["prefiller_packed_bytes"] > before
    assert not pair.prefiller.has_finished(name)
    pair.prefiller.order("resume")
    params = pair.prefiller.wait(name).params
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(tokens, 16, params).tokens == local.tokens
    pair.assert_empty()


@pytest.mark.boots
def test_preempted_prefills(rig):
    """Room for 480 tokens, four prompts of 200 and 40 tokens to decode: some are preempted and computed anew, into other blocks."""
    pair = rig.pair({**STEPWISE, "kv_cache_memory_bytes": 3 << 20, "max_model_len": 256})
    prompts = [prompt(200, seed=80 + n) for n in range(4)]
    names = [pair.prefiller.add(tokens, 40, offer()) for tokens in prompts]
    params = [pair.prefiller.wait(name).params for name in names]
    assert pair.prefiller.order("metrics")["vllm:num_preemptions"] > 0
    pair.decoder.rpc("poison")
    found = [pair.decoder.generate(tokens, 8, one).tokens for tokens, one in zip(prompts, params, strict=True)]
    assert found == [pair.local(tokens, 8).tokens for tokens in prompts]
    pair.assert_empty()


@pytest.mark.boots
def test_only_what_the_decoder_lacks_is_fetched(rig):
    """Blocks of 128 tokens: the first is in the decoder's prefix cache, and no byte of it is written again."""
    pair = rig.pair(None, CACHING)
    pair.decoder.order("reset_prefix_cache")
    tokens = prompt(300, seed=90)
    pair.decoder.rpc("poison")
    local = pair.decoder.generate(tokens, 8).tokens
    pair.decoder.order("reset_prefix_cache")
    pair.decoder.rpc("poison")
    pair.decoder.generate(tokens[:200] + prompt(60, seed=91), 1)
    params = pair.prefill(tokens).params
    before, bytes_before = pair.decoder.rpc("pages")[0], pair.decoder.counters().get("decoder_received_bytes", 0)
    found = pair.decoder.generate(tokens, 8, params)
    after = pair.decoder.rpc("pages")[0]
    assert found.tokens == local
    written = [page for page, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert len(written) == 2, "tokens 128 to 255, and 256 to 307"
    received = pair.decoder.counters()["decoder_received_bytes"] - bytes_before
    assert 172 * 6144 <= received < 190 * 6144
    pair.decoder.assert_empty()


@pytest.mark.boots
def test_everything_is_there_already(rig):
    """A second request with the same prompt fetches the last block only; one with prompt_logprobs, which vLLM computes, fetches nothing."""
    pair, tokens = rig.pair(None, CACHING), prompt(256, seed=92)
    params = [pair.prefill(tokens).params for _ in range(3)]
    pair.decoder.order("reset_prefix_cache")
    pair.decoder.rpc("poison")
    found = [pair.decoder.generate(tokens, 8, one) for one in params[:2]]
    found.append(pair.decoder.generate(tokens, 8, params[2], prompt_logprobs=1))
    assert len({tuple(one.tokens) for one in found}) == 1
    pair.assert_empty()


@pytest.mark.boots
def test_the_prefillers_own_prefix_hits_are_handed_off(rig):
    pair, tokens = rig.pair(CACHING), prompt(300, seed=93)
    pair.prefiller.generate(tokens, 1)
    handed_off, local = pair.handed_off(tokens), pair.local(tokens)
    assert handed_off.tokens == local.tokens
    assert handed_off.cached is None or handed_off.cached >= 0
    pair.assert_empty()


@pytest.mark.boots
def test_lossy_payloads_need_consent_to_enter_a_prefix_cache(rig):
    pair, tokens = rig.pair(None, CACHING), prompt(300, seed=94)
    params = pair.prefill(tokens, "turboquant_4bit_nc").params
    assert pair.decoder.generate(tokens, 4, params).reason == "error"
    assert pair.decoder.counters()["load_failed{lossy_payload}"] == 1
    assert pair.decoder.generate(tokens, 4, pair.prefill(tokens, "raw").params).reason == "length"
    pair.assert_empty()
    pair = rig.pair(None, CONSENT)
    params = pair.prefill(tokens, "turboquant_4bit_nc").params
    assert pair.decoder.generate(tokens, 4, params).reason == "length"
    pair.assert_empty()
