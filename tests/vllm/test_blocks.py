"""How long the prefiller keeps its blocks: one step where staging has room, until the decoder has taken them where it has not."""

import time

import pytest

from tests.vllm.engine import free_ports
from tests.vllm.models import prompt
from tests.vllm.rig import OFFER, offer
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL_STAGING = {"extra": {"staging_bytes": 1 << 20, "chunk_tokens": 32}}
"""A payload of 900 tokens has 5.5 MB."""
DELAY = 1.0
"""Seconds between the prefiller's answer and the decoder's question, as a router under load takes them."""
LONG_DELAY = 6.0
"""The same where the blocks' time is measured, of which a step of a busy engine is part."""


def steps_until_free(engine, tokens):
    """(steps from the one that finished the prefill to the one after which all blocks are free, kv_transfer_params). No decoder asks."""
    engine.order("pause")
    name = engine.add(tokens, 1, offer())
    state = engine.order("step")
    while not engine.has_finished(name):
        state = engine.order("step")
    steps = 0
    while state["free"] != engine.ready["free"] and steps < 5:
        state = engine.order("step")
        steps += 1
    engine.order("resume")
    return steps, engine.wait(name).params


def test_free_within_one_step_with_the_payload_still_in_staging(rig):
    pair, tokens = rig.pair(), prompt(900, seed=31)
    steps, params = steps_until_free(pair.prefiller, tokens)
    assert steps <= 1 + pair.prefiller.ahead
    counters = pair.prefiller.counters()
    assert counters["leases"] == 1
    assert counters["prefiller_staging_bytes"] > 900 * 6144
    assert counters.get("held", 0) == 0
    # The blocks are used again before the decoder asks: what it gets was packed before that.
    pair.prefiller.rpc("poison")
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(tokens, 8, params).tokens == pair.local(tokens, 8).tokens
    pair.assert_empty()


@pytest.mark.boots
@pytest.mark.parametrize("delay", [0.0, DELAY])
def test_held_while_staging_is_full_and_counted(rig, delay):
    pair, tokens = rig.pair(SMALL_STAGING), prompt(900, seed=32)
    before = pair.prefiller.counters().get("held", 0)
    params = pair.prefill(tokens).params
    if delay:
        time.sleep(delay)
        state = pair.prefiller.state()
        assert state["free"] < pair.prefiller.ready["free"], "the blocks are kept"
        assert state["requests"] == 1
    assert pair.prefiller.counters()["held"] == before + 1
    pair.decoder.rpc("poison")
    found = pair.decoder.generate(tokens, 8, params)
    assert found.tokens == pair.local(tokens, 8).tokens
    pair.assert_empty()


@pytest.mark.boots
def test_a_prefill_in_many_steps_that_finds_staging_full_counts_it_once(rig):
    pair, tokens = rig.pair({**SMALL_STAGING, "max_num_batched_tokens": 64, "max_num_seqs": 4}), prompt(900, seed=34)
    params = pair.prefill(tokens).params
    counters = pair.prefiller.counters()
    assert (counters["held"], counters["prefiller_refused{staging_full}"]) == (1, 1)
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(tokens, 8, params).tokens == pair.local(tokens, 8).tokens
    pair.assert_empty()


@pytest.mark.boots
def test_held_requests_that_nobody_asks_for_are_given_up(rig):
    pair = rig.pair(SMALL_STAGING)
    pair.prefill(prompt(900, seed=33))
    assert pair.prefiller.counters()["leases"] == 1
    pair.run_out()
    pair.prefiller.assert_empty()


@pytest.mark.boots
def test_several_held_at_once(rig):
    pair = rig.pair(SMALL_STAGING)
    prompts = [prompt(600 + 50 * n, seed=40 + n) for n in range(4)]
    params = [pair.prefill(tokens).params for tokens in prompts]
    pair.decoder.rpc("poison")
    found = [pair.decoder.generate(tokens, 8, one).tokens for tokens, one in reversed(list(zip(prompts, params, strict=True)))]
    assert found[::-1] == [pair.local(tokens, 8).tokens for tokens in prompts]
    pair.assert_empty()


def hold_seconds(pair, tokens, params):
    """Seconds from the prefiller's answer until its blocks are free, with a decoder that is called LONG_DELAY later."""
    done = pair.prefiller.generate(tokens, 1, params)
    start, free_after = time.monotonic(), None
    asked = None
    while free_after is None:
        if pair.prefiller.state()["free"] == pair.prefiller.ready["free"]:
            free_after = time.monotonic() - start
        if asked is None and time.monotonic() - start > LONG_DELAY:
            asked = pair.decoder.add(tokens, 8, done.params)
        assert time.monotonic() - start < LONG_DELAY + PATIENCE
        time.sleep(0.005)
    if asked is None:
        time.sleep(max(0.0, LONG_DELAY - (time.monotonic() - start)))
        asked = pair.decoder.add(tokens, 8, done.params)
    return free_after, pair.decoder.wait(asked)


@pytest.mark.boots
def test_hold_time_beside_the_stock_connector(rig, capsys):
    tokens = prompt(900, seed=34)
    same = {"block_size": 128}
    pair = rig.pair(same, same)
    right = pair.local(tokens, 8).tokens
    ours, found = hold_seconds(pair, tokens, offer())
    assert found.tokens == right
    ports = free_ports(2)
    stock = {"kv_connector": "NixlConnector", "kv_connector_module_path": None, "kv_connector_extra_config": {}, "kv_buffer_device": "cpu"}
    pair = rig.pair(
        *({**same, "connector": stock, "environment": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}} for port in (ports, ports + 1))
    )
    theirs, found = hold_seconds(pair, tokens, {**OFFER, "remote_engine_id": None, "remote_block_ids": None})
    assert found.tokens == right
    with capsys.disabled():
        print(f"\nblocks held after the prefill: {ours:.3f} s here, {theirs:.3f} s with NixlConnector; asked after {LONG_DELAY} s")
    assert ours < LONG_DELAY / 2
    assert theirs >= LONG_DELAY
