"""Aborts, deaths and restarts: right tokens, finish_reason error or a local recompute, and both engines alive and empty afterwards."""

import pytest

from tests.vllm.engine import EngineDied
from tests.vllm.models import prompt
from tests.vllm.rig import largest_difference, offer, ticket_params
from tests.waiting import PATIENCE, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = prompt(900, seed=11)
"""Eight chunks of 128 tokens."""
RECOMPUTE = {"connector": {"kv_load_failure_policy": "recompute"}}
STEPWISE = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


def still_well(pair, seed):
    """A hand-off after what has happened, and nothing left over."""
    tokens = prompt(200, seed=seed)
    handed_off = pair.handed_off(tokens, 8)
    local = pair.local(tokens, 8)
    assert handed_off.tokens == local.tokens
    assert largest_difference(handed_off, local) < 1e-4
    pair.assert_empty()


def slow_fetch(pair):
    """Every chunk takes 0.3 s to read: time for an abort in the middle."""
    pair.decoder.rpc("at", "decoder", "reading", "sleep_always", 0, 0.3)


def arrived(pair):
    return sum(1 for step, _ in pair.decoder.rpc("steps")[0] if step == "arrived")


@pytest.mark.parametrize("moment", ["before its first step", "while it is received", "when it has been received", "while it decodes"])
def test_the_decoders_engine_aborts(rig, moment):
    pair = rig.pair()
    params = pair.prefill(TOKENS).params
    slow_fetch(pair)
    pair.decoder.order("pause")
    name = pair.decoder.add(TOKENS, 100, params)
    if moment == "while it is received":
        pair.decoder.order("step")
        assert eventually(lambda: arrived(pair) >= 2)
    elif moment == "when it has been received":
        pair.decoder.order("step")
        assert eventually(lambda: ["released", None] in pair.decoder.rpc("steps")[0])
        pair.decoder.order("step")
    elif moment == "while it decodes":
        pair.decoder.order("step")
        assert eventually(lambda: ["released", None] in pair.decoder.rpc("steps")[0])
        pair.decoder.order("step", count=6)
        assert list(pair.decoder.order("statuses").values()) == ["RUNNING"]
    pair.decoder.abort(name)
    pair.decoder.order("resume")
    pair.assert_empty()
    pair.decoder.rpc("calm")
    still_well(pair, seed=12)


def test_the_prefillers_engine_aborts_before_it_begins(rig):
    pair = rig.pair()
    pair.prefiller.order("pause")
    name = pair.prefiller.add(TOKENS, 1, offer())
    pair.prefiller.abort(name)
    pair.prefiller.order("resume")
    still_well(pair, seed=13)


@pytest.mark.boots
@pytest.mark.parametrize("steps", [1, 3, 14])
def test_the_prefillers_engine_aborts_between_chunks(rig, steps):
    pair = rig.pair(STEPWISE)
    pair.prefiller.order("pause")
    name = pair.prefiller.add(TOKENS, 1, offer())
    pair.prefiller.order("step", count=steps)
    assert pair.prefiller.counters()["prefiller_staging_bytes"] > 0, "it was on its way"
    pair.prefiller.abort(name)
    pair.prefiller.order("resume")
    pair.prefiller.assert_empty()
    still_well(pair, seed=14)


@pytest.mark.parametrize("what", ["pack", "land"])
def test_a_device_that_fails(rig, what):
    pair = rig.pair()
    side = pair.prefiller if what == "pack" else pair.decoder
    side.rpc("break", what)
    params = pair.prefill(TOKENS).params
    assert pair.decoder.generate(TOKENS, 4, params).reason == "error"
    side.rpc("calm")
    still_well(pair, seed=15)


def test_nobody_asks_in_time(rig):
    pair = rig.pair()
    params = pair.prefill(TOKENS).params
    before = pair.prefiller.counters().get("prefiller_failed{lease_expired}", 0)
    pair.run_out()
    pair.prefiller.assert_empty()
    assert pair.prefiller.counters()["prefiller_failed{lease_expired}"] == before + 1
    assert pair.decoder.generate(TOKENS, 4, params).reason == "error"
    still_well(pair, seed=16)


@pytest.mark.boots
def test_the_prefiller_is_killed_in_mid_transfer_and_restarted(rig):
    """The decoder's engine lives through it, with its connection, and works with the new process under the same name and port."""
    pair = rig.pair()
    params = pair.prefill(TOKENS).params
    pair.prefiller.rpc("at", "prefiller", "taken", "kill", 2)
    pair.decoder.rpc("poison")
    found = pair.decoder.generate(TOKENS, 4, params)
    assert (found.reason, found.tokens) == ("error", [])
    assert pair.prefiller.process.wait(PATIENCE) == -9
    pair.decoder.assert_empty()
    # With nobody there.
    assert pair.decoder.generate(TOKENS, 4, ticket_params()).reason == "error"
    decoder = pair.decoder.process.pid
    pair = rig.pair()
    assert pair.decoder.process.pid == decoder
    # A ticket of the dead process.
    assert pair.decoder.generate(TOKENS, 4, params).reason == "error"
    still_well(pair, seed=17)


@pytest.mark.boots
def test_the_decoder_is_killed_in_mid_transfer_and_restarted(rig):
    pair = rig.pair()
    params = pair.prefill(TOKENS).params
    pair.decoder.rpc("at", "decoder", "arrived", "kill", 2)
    with pytest.raises(EngineDied):
        pair.decoder.generate(TOKENS, 4, params)
    pair.prefiller.assert_empty()
    assert pair.prefiller.counters()["prefiller_failed{peer_lost}"] == 1
    still_well(rig.pair(), seed=18)


@pytest.mark.boots
def test_recompute(rig):
    """With the policy `recompute` every failure becomes a local prefill, with the tokens of one."""
    pair = rig.pair(None, RECOMPUTE)
    local = pair.local(TOKENS, 8).tokens
    good = pair.prefill(TOKENS).params
    other = pair.prefill(prompt(900, seed=20)).params
    slow_fetch(pair)
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(TOKENS, 8, ticket_params()).tokens == local
    assert pair.decoder.generate(TOKENS, 8, other).tokens == local
    assert pair.decoder.generate(TOKENS, 8, {"do_remote_prefill": True, "remote_host": "x"}).tokens == local
    pair.decoder.rpc("calm")
    pair.decoder.rpc("break", "land")
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(TOKENS, 8, good).tokens == local
    pair.decoder.rpc("calm")
    assert pair.decoder.counters()["load_failed{content_differs}"] == 1
    pair.assert_empty()
    params = pair.prefill(TOKENS).params
    pair.prefiller.rpc("at", "prefiller", "taken", "kill", 2)
    pair.decoder.rpc("poison")
    assert pair.decoder.generate(TOKENS, 8, params).tokens == local
    pair.decoder.assert_empty()
    still_well(rig.pair(None, RECOMPUTE), seed=19)
