"""fp32 on both ends and the codec raw: what the decoder says after a hand-off is what it says alone. Blocks: 32 tokens there, 128 here."""

import random

import pytest

from tests.vllm.models import prompt, smollm2
from tests.vllm.rig import largest_difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 127, 128, 129, 200, 255, 300, 384, 511, 512, 700, 900)
SAMPLE = sorted(random.Random(20261130).sample(LENGTHS, 4))
"""The small part, by seed. The shortest and the longest are always in it."""
TOLERANCE = 1e-4
SMOLLM2 = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}


def check(pair, length, vocabulary=512):
    tokens = prompt(length, seed=length, vocabulary=vocabulary)
    handed_off = pair.handed_off(tokens)
    local = pair.local(tokens)
    assert handed_off.reason == local.reason == "length"
    assert handed_off.tokens == local.tokens
    assert len(local.logprobs) == 16
    assert largest_difference(handed_off, local) < TOLERANCE


@pytest.mark.parametrize("length", sorted({1, 900, *SAMPLE}))
def test_tokens_and_log_probabilities_are_those_without_hand_off(rig, length):
    pair = rig.pair()
    before = pair.decoder.counters().get("decoder_committed", 0)
    check(pair, length)
    assert pair.decoder.counters()["decoder_committed"] == before + 1, "the pages came from the prefiller"
    pair.assert_empty()


@pytest.mark.boots
@pytest.mark.parametrize("length", [n for n in LENGTHS if n not in {1, 900, *SAMPLE}])
def test_all_other_lengths(rig, length):
    check(rig.pair(), length)


def test_another_prompts_cache_fails_the_comparison(rig, tmp_path):
    """The negative control: were the wrong KV in the pages, the comparison above would see it. It is put there past the bridge."""
    pair, right, wrong = rig.pair(), prompt(200, seed=1), prompt(200, seed=2)
    pair.dump(wrong, tmp_path)
    misled = pair.oracle(right, "raw", tmp_path)
    pair.dump(right, tmp_path)
    well_led = pair.oracle(right, "raw", tmp_path)
    local = pair.local(right)
    assert well_led.tokens == local.tokens
    assert largest_difference(well_led, local) < TOLERANCE
    assert misled.tokens != local.tokens
    assert largest_difference(misled, local) > 100 * TOLERANCE
    pair.assert_empty()


def test_another_prompts_cache_is_refused(rig):
    pair = rig.pair()
    params = pair.prefill(prompt(200, seed=2)).params
    before = pair.decoder.counters().get("load_failed{content_differs}", 0)
    assert pair.decoder.generate(prompt(200, seed=1), 4, params).reason == "error"
    assert pair.decoder.counters()["load_failed{content_differs}"] == before + 1
    pair.assert_empty()


def test_counters_reach_prometheus(rig):
    pair = rig.pair()
    pair.decoder.generate(prompt(40, seed=3), 2, pair.prefill(prompt(40, seed=3)).params)
    pair.decoder.generate(prompt(40, seed=3), 2, {"do_remote_prefill": True})
    metrics, counters = pair.decoder.order("metrics"), pair.decoder.counters()
    assert metrics["vllm:kvbridge_events[side=decoder,event=committed,clause=]"] == counters["decoder_committed"] > 0
    assert metrics["vllm:kvbridge_events[side=,event=load_failed,clause=bad_parameters]"] == counters["load_failed{bad_parameters}"] > 0
    assert metrics["vllm:kvbridge_staging_bytes[side=decoder,event=,clause=]"] == 0


@pytest.mark.boots
@pytest.mark.model
@pytest.mark.timeout(900)
def test_smollm2(rig):
    settings = {"model": str(smollm2()), **SMOLLM2}
    pair = rig.pair(settings, settings)
    for length in LENGTHS:
        check(pair, length, vocabulary=49000)
    pair.assert_empty()
