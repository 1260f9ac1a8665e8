"""What a prompt's KV depends on besides its tokens: adapters by their content, prompts of embeddings."""

import shutil

import pytest

from tests.vllm.models import make_adapter, prompt
from tests.vllm.rig import largest_difference, offer

pytestmark = [pytest.mark.vllm, pytest.mark.boots, pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTERS = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
VECTORS = {"enable_prompt_embeds": True}


def test_one_adapter_in_two_places_and_another_of_its_name(rig, tmp_path):
    pair, tokens = rig.pair(ADAPTERS, ADAPTERS), prompt(200, seed=90)
    mine = make_adapter(tmp_path / "mine", seed=1)
    same = shutil.copytree(mine, tmp_path / "same")
    other = make_adapter(tmp_path / "other", seed=2)

    params = pair.prefiller.generate(tokens, 1, offer(), adapter=str(mine)).params
    pair.decoder.rpc("poison")
    received = pair.decoder.generate(tokens, 16, params, adapter=str(same))
    local = pair.local(tokens, 16, adapter=str(same))
    assert received.tokens == local.tokens
    assert largest_difference(received, local) < 1e-4
    assert pair.decoder.counters().get("decoder_committed", 0) == 1
    assert local.tokens != pair.local(tokens, 16).tokens, "the adapter changes what is decoded"

    params = pair.prefiller.generate(tokens, 1, offer(), adapter=str(mine)).params
    refused = pair.decoder.generate(tokens, 16, params, adapter=str(other))
    assert refused.reason == "error"
    assert pair.decoder.counters()["load_failed{content_differs}"] == 1
    params = pair.prefiller.generate(tokens, 1, offer(), adapter=str(mine)).params
    assert pair.decoder.generate(tokens, 16, params).reason == "error", "no adapter there"
    pair.assert_empty()


def test_an_adapter_that_was_overwritten_is_no_longer_compared(rig, tmp_path):
    """The decoder goes on computing with what it has loaded, so the new files say nothing, even where they are the prefiller's."""
    pair, tokens = rig.pair(ADAPTERS, ADAPTERS), prompt(100, seed=91)
    mine, theirs, new = (make_adapter(tmp_path / name, seed) for name, seed in (("mine", 1), ("theirs", 1), ("new", 3)))
    params = pair.prefiller.generate(tokens, 1, offer(), adapter=str(mine)).params
    before = pair.decoder.generate(tokens, 4, params, adapter=str(theirs))
    assert before.reason == "length"
    shutil.rmtree(theirs)
    make_adapter(theirs, seed=3)
    assert pair.local(tokens, 4, adapter=str(theirs)).tokens == before.tokens, "vLLM computes with what it has loaded"
    params = pair.prefiller.generate(tokens, 1, offer(), adapter=str(new)).params
    assert pair.decoder.generate(tokens, 4, params, adapter=str(theirs)).reason == "error"
    assert pair.decoder.counters()["load_failed{adapter_unknown}"] == 1
    pair.assert_empty()


def test_prompts_of_embeddings(rig):
    pair, tokens = rig.pair(VECTORS, VECTORS), [0] * 150
    params = pair.prefiller.generate(tokens, 1, offer(), vectors=5).params
    pair.decoder.rpc("poison")
    received, local = pair.decoder.generate(tokens, 16, params, vectors=5), pair.local(tokens, 16, vectors=5)
    assert received.tokens == local.tokens
    assert largest_difference(received, local) < 1e-4
    assert local.tokens != pair.local(tokens, 16, vectors=6).tokens
    params = pair.prefiller.generate(tokens, 1, offer(), vectors=5).params
    assert pair.decoder.generate(tokens, 16, params, vectors=6).reason == "error"
    pair.assert_empty()
