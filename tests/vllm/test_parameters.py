"""What routers and clients may pass: right tokens, or finish_reason error, and both engines alive and empty afterwards."""

import copy

import pytest

from tests.vllm.models import prompt
from tests.vllm.rig import OFFER, offer, ticket_params

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "5f3c",
    "remote_request_id": "cmpl-1",
    "remote_host": "localhost",
    "remote_port": 5600,
    "tp_size": 1,
}


def changed(path, value):
    """Well-formed parameters with one entry replaced, or taken out where value is None."""
    params = copy.deepcopy(ticket_params())
    *way, last = path.split(".")
    inner = params
    for key in way:
        inner = inner[key]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return params


BAD_FOR_DECODER = {
    "another connector's": NIXL,
    "kvbridge missing": changed("kvbridge", None),
    "kvbridge no object": changed("kvbridge", [1]),
    "ticket missing": changed("kvbridge.ticket", None),
    "ticket no object": changed("kvbridge.ticket", "prefill-0"),
    "peer missing": changed("kvbridge.ticket.peer", None),
    "peer unknown": changed("kvbridge.ticket.peer", "prefill-9"),
    "peer very long": changed("kvbridge.ticket.peer", "p" * 100_000),
    "request id a number": changed("kvbridge.ticket.request_id", 7),
    "request id no text": changed("kvbridge.ticket.request_id", "\ud800"),
    "lease a number": changed("kvbridge.ticket.lease", 7),
    "lease too short": changed("kvbridge.ticket.lease", "7f"),
    "generation negative": changed("kvbridge.ticket.generation", -1),
    "generation huge": changed("kvbridge.ticket.generation", 2**63),
    "generation true": changed("kvbridge.ticket.generation", True),
    "rank huge": changed("kvbridge.ticket.rank", 10**9),
    "tp_size missing": changed("kvbridge.tp_size", None),
    "tp_size none": changed("kvbridge.tp_size", 0),
    "tp_size impossible": changed("kvbridge.tp_size", 3),
    "tp_size many": changed("kvbridge.tp_size", 64),
    "tp_size huge": changed("kvbridge.tp_size", 2**63),
    "tp_size a text": changed("kvbridge.tp_size", "1"),
    "tp_size fractional": changed("kvbridge.tp_size", 1.5),
    "tokens missing": changed("kvbridge.tokens", None),
    "tokens huge": changed("kvbridge.tokens", 2**63),
    "flag a text": changed("do_remote_prefill", "yes"),
    "both flags": changed("do_remote_decode", True),
    "a lease that nobody offered": ticket_params(),
}
ASKS_NOTHING = {"empty": {}, "strange keys": {"a": {"b": [1]}}, "flags false": {"do_remote_prefill": False, "do_remote_decode": False}}


@pytest.mark.parametrize("name", BAD_FOR_DECODER)
def test_bad_parameters_fail_only_their_request(rig, name):
    pair = rig.pair()
    found = pair.decoder.generate(prompt(50, seed=3), 4, BAD_FOR_DECODER[name])
    assert found.reason == "error"
    assert found.tokens == []
    pair.decoder.assert_empty()


@pytest.mark.parametrize("name", ASKS_NOTHING)
def test_parameters_that_ask_nothing_change_nothing(rig, name):
    pair, tokens = rig.pair(), prompt(50, seed=4)
    assert pair.decoder.generate(tokens, 4, ASKS_NOTHING[name]).tokens == pair.local(tokens, 4).tokens


def test_what_vllm_itself_refuses(rig):
    pair, tokens = rig.pair(), prompt(50, seed=4)
    for wrong in ([1], "text", 7, changed("kvbridge.tokens", 10**40)):
        with pytest.raises(RuntimeError):
            pair.decoder.generate(tokens, 4, wrong)
    assert pair.decoder.generate(tokens, 4).reason == "length"
    pair.decoder.assert_empty()


def bad_parameters(engine):
    """How many requests were counted so; one that asks for both is taken for one that wants to fetch."""
    counters = engine.counters()
    return sum(counters.get(f"{event}{{bad_parameters}}", 0) for event in ("send_failed", "load_failed"))


@pytest.mark.parametrize(
    "params",
    [
        {**OFFER, "kvbridge": [1]},
        {**OFFER, "kvbridge": {"codec": 5}},
        {**OFFER, "kvbridge": {"codec": "gzip"}},
        {**OFFER, "kvbridge": {"codec": "raw" * 100}},
        {"do_remote_decode": "yes"},
        {"do_remote_decode": True, "do_remote_prefill": True},
    ],
    ids=["no object", "codec a number", "codec unknown", "codec long", "flag a text", "both flags"],
)
def test_a_prefill_with_bad_parameters_gives_no_ticket(rig, params):
    pair, tokens = rig.pair(), prompt(50, seed=5)
    before = bad_parameters(pair.prefiller)
    found = pair.prefiller.generate(tokens, 1, params)
    assert found.reason in ("length", "error")
    assert not found.params
    assert bad_parameters(pair.prefiller) == before + 1
    pair.prefiller.assert_empty()


def test_a_decoder_gives_no_tickets_and_a_prefiller_fetches_nothing(rig):
    pair, tokens = rig.pair(), prompt(50, seed=5)
    assert not pair.decoder.generate(tokens, 1, offer()).params
    assert pair.prefiller.generate(tokens, 1, ticket_params()).reason == "error"
    pair.assert_empty()


def test_a_ticket_serves_once(rig):
    pair, tokens = rig.pair(), prompt(300, seed=6)
    params = pair.prefill(tokens).params
    first = pair.decoder.generate(tokens, 8, params)
    second = pair.decoder.generate(tokens, 8, params)
    assert first.tokens == pair.local(tokens, 8).tokens
    assert (second.reason, second.tokens) == ("error", [])
    pair.assert_empty()


def test_a_ticket_used_twice_at_the_same_time(rig):
    pair, tokens = rig.pair(), prompt(900, seed=7)
    params = pair.prefill(tokens).params
    pair.decoder.rpc("poison")
    names = [pair.decoder.add(tokens, 8, params) for _ in range(2)]
    found = [pair.decoder.wait(name) for name in names]
    right = pair.local(tokens, 8).tokens
    assert sorted(one.reason for one in found) == ["error", "length"]
    assert [one.tokens for one in found if one.reason == "length"] == [right]
    pair.assert_empty()


@pytest.mark.parametrize("change", [{"request_id": "another"}, {"generation": 2}, {"lease": "0" * 16}], ids=str)
def test_a_ticket_that_was_changed_on_the_way(rig, change):
    pair, tokens = rig.pair(), prompt(60, seed=8)
    params = pair.prefill(tokens).params
    wrong = copy.deepcopy(params)
    wrong["kvbridge"]["ticket"].update(change)
    assert pair.decoder.generate(tokens, 4, wrong).reason == "error"
    # The payload is still there for the right ticket.
    assert pair.decoder.generate(tokens, 4, params).tokens == pair.local(tokens, 4).tokens
    pair.assert_empty()


def test_a_tickets_rank_is_the_connectors_business(rig):
    pair, tokens = rig.pair(), prompt(60, seed=8)
    params = pair.prefill(tokens).params
    params["kvbridge"]["ticket"]["rank"] = 1
    assert pair.decoder.generate(tokens, 4, params).tokens == pair.local(tokens, 4).tokens
    pair.assert_empty()


@pytest.mark.parametrize("request_id", ["a b/c\n\x00\u00e9\U0001f600", "r" * 5000, "\u00e9" * 200])
def test_request_ids_of_any_kind(rig, request_id):
    pair, tokens = rig.pair(), prompt(60, seed=9)
    params = pair.prefill(tokens, request_id=request_id).params
    assert pair.decoder.generate(tokens, 4, params, request_id=request_id).tokens == pair.local(tokens, 4).tokens
    pair.assert_empty()
