"""Every way a hand-off can fail has a type, is counted on both sides, and frees everything."""

import time
from dataclasses import replace

import pytest
import torch

from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Mode, PeerConfig, Ticket, errors
from bridge.handoff import decoder as decoder_module
from bridge.handoff.decoder import Target
from bridge.handoff.session import Session
from bridge.transfer.errors import TransferFailed, TransferTimeout
from bridge.wire import ContentKind, token_digest
from bridge.wire.errors import BadTag
from tests.handoff.pair import BOUNDS, HEADS, LAYERS, TOKENS, Pair, block_table, everything_is_free, manifest, parked
from tests.ports import kept_port
from tests.waiting import PATIENCE, eventually


def fetch_fails(pair, ticket, target, kind, **more):
    with pytest.raises(kind) as caught:
        pair.decoder.start(ticket, pair.target(*target, **more)).result(2 * PATIENCE)
    assert pair.decoder.counters.snapshot()[f"failed{{{caught.value.clause}}}"] == 1
    assert ";" in str(caught.value), "an error says what to do"
    return caught.value


def test_unknown_lease(pair, target):
    error = fetch_fails(pair, Ticket("prefill-0", "r", 1, 1), target, errors.Refused)
    assert error.clause == errors.UnknownLease.clause
    assert pair.prefiller.counters.snapshot()["refused{unknown_lease}"] == 1


def test_ticket_of_another_request_with_this_lease(pair, source, target):
    ticket = parked(pair, source).ticket
    error = fetch_fails(pair, Ticket("prefill-0", "other", ticket.lease, ticket.generation), target, errors.Refused)
    assert error.clause == errors.UnknownLease.clause


def test_offering_anew_revokes_the_earlier_generation(pair, source, target):
    first = parked(pair, source)
    second = parked(pair, source)
    assert second.ticket.lease == first.ticket.lease
    assert second.ticket.generation == first.ticket.generation + 1
    with pytest.raises(errors.StaleGeneration):
        first.wait(PATIENCE)
    assert fetch_fails(pair, first.ticket, target, errors.Refused).clause == errors.StaleGeneration.clause
    pair.decoder.fetch(second.ticket, pair.target(*target))
    second.wait(PATIENCE)
    assert everything_is_free(pair)


def test_a_committed_lease_is_gone(pair, source, target):
    offer = parked(pair, source)
    pair.decoder.fetch(offer.ticket, pair.target(*target))
    offer.wait(PATIENCE)
    assert fetch_fails(pair, offer.ticket, target, errors.Refused).clause == errors.UnknownLease.clause


def test_claimed_twice(pair, source, target):
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: "decoder granted" in pair.steps)
    other = pair.new_decoder()
    with pytest.raises(errors.Refused) as caught:
        other.fetch(offer.ticket, pair.target(*target))
    assert caught.value.clause == errors.LeaseTaken.clause
    other.close()
    offer.advance(TOKENS)
    fetch.result(PATIENCE)


def test_a_claim_that_is_refused_prolongs_nothing(pair, source, target):
    """Refused again and again, it kept the lease and its staging memory for ever."""
    lease = (offer := parked(pair, source))._lease
    before = lease.deadline, lease.readers
    error = fetch_fails(pair, offer.ticket, target, errors.Refused, reader=3, readers=2)
    assert error.clause == errors.ProtocolError.clause
    assert "reader 3 of 2 claims the lease, which cannot be; readers count from 0" in str(error)
    assert (lease.deadline, lease.readers) == before
    pair.decoder.fetch(offer.ticket, pair.target(*target))
    offer.wait(PATIENCE)


def test_expiry(tmp_path, source, target):
    start, pair = time.monotonic(), Pair(tmp_path)
    offer = parked(pair, source)
    with pair.prefiller._leases.lock:
        # Its time is counted from the last sign of progress; then it has passed.
        assert start + pair.bounds.lease < offer._lease.deadline <= time.monotonic() + pair.bounds.lease
        offer._lease.deadline = time.monotonic()
    with pytest.raises(errors.LeaseExpired):
        offer.wait(PATIENCE)
    assert everything_is_free(pair)
    assert fetch_fails(pair, offer.ticket, target, errors.Refused).clause == errors.LeaseExpired.clause
    assert pair.prefiller.counters.snapshot()["failed{lease_expired}"] == 1
    assert pair.steps.count("prefiller expired") == 1
    pair.close()


def test_cancelled_by_the_prefiller_in_mid_stream(pair, source, target):
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    offer.advance(64)
    assert eventually(lambda: "decoder landed" in pair.steps)
    offer.cancel()
    with pytest.raises(errors.Refused) as caught:
        fetch.result(PATIENCE)
    assert caught.value.clause == errors.Cancelled.clause
    with pytest.raises(errors.Cancelled):
        offer.advance(TOKENS)
    assert everything_is_free(pair)


def test_cancelled_by_the_decoder_in_mid_stream(pair, source, target):
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    offer.advance(64)
    assert eventually(lambda: "decoder landed" in pair.steps)
    fetch.cancel()
    with pytest.raises(errors.Cancelled):
        fetch.result(PATIENCE)
    with pytest.raises(errors.Refused) as caught:
        offer.wait(PATIENCE)
    assert caught.value.clause == errors.Cancelled.clause
    assert everything_is_free(pair)


def test_cancelled_before_it_began(pair, source, target):
    offer = parked(pair, source)
    pair.agent.gate.clear()  # or it may be done before it is cancelled
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    fetch.cancel()
    with pytest.raises(errors.Cancelled):
        fetch.result(PATIENCE)
    pair.agent.gate.set()
    offer.cancel()
    assert everything_is_free(pair)


def test_a_damaged_block_is_never_committed(pair, source, target):
    offer = parked(pair, source)
    view = pair.prefiller._memory.bytes()
    view[7] ^= 1
    fetch_fails(pair, offer.ticket, target, BadTag)
    assert all(torch.isnan(layer.key).all() for layer in (target[0].layers[0],))
    with pytest.raises(errors.Refused) as caught:
        offer.wait(PATIENCE)
    assert caught.value.clause == BadTag.clause
    assert "committed" not in pair.prefiller.counters.snapshot()
    assert everything_is_free(pair)


def test_a_transfer_that_fails(pair, source, target):
    offer = parked(pair, source)
    pair.agent.broken = True
    fetch_fails(pair, offer.ticket, target, TransferFailed)
    pair.agent.broken = False
    assert everything_is_free(pair)


def test_a_transfer_that_does_not_end_is_quarantined(tmp_path, source, target):
    pair = Pair(tmp_path, bounds=replace(BOUNDS, transfer=0.3))
    offer = parked(pair, source)
    pair.agent.gate.clear()
    fetch_fails(pair, offer.ticket, target, TransferTimeout)
    assert pair.decoder.quarantined() > 0
    assert pair.decoder.staging()[0] > 0
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.quarantined() == 0)
    assert everything_is_free(pair)
    pair.close()


def test_staging_that_is_full_or_too_small(tmp_path, source, target):
    pair = Pair(tmp_path, staging_bytes=1 << 17)
    first = pair.prefiller.offer(manifest("a", 64), *source)
    with pytest.raises(errors.StagingFull):
        pair.prefiller.offer(manifest("b", TOKENS), *source)
    assert pair.prefiller.counters.snapshot()["refused{staging_full}"] == 1
    first.cancel()
    with pytest.raises(errors.StagingFull):
        pair.prefiller.offer(manifest("c", TOKENS, chunk_tokens=256), *source, mode=Mode.STREAM)
    assert everything_is_free(pair)
    pair.close()


def test_streaming_without_a_decoder_ends(tmp_path, source):
    pair = Pair(tmp_path, bounds=replace(BOUNDS, chunk=0.3))
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    with pytest.raises(errors.HandoffTimeout):
        offer.advance(TOKENS)
    assert everything_is_free(pair)
    pair.close()


def test_a_prefiller_that_never_packs(tmp_path, source, target):
    pair = Pair(tmp_path, bounds=replace(BOUNDS, chunk=0.3))
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
    fetch_fails(pair, offer.ticket, target, errors.HandoffTimeout)
    with pytest.raises(errors.Refused):
        offer.wait(PATIENCE)
    assert everything_is_free(pair)
    pair.close()


def test_the_prefiller_shuts_down(pair, source, target):
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: "decoder granted" in pair.steps)
    pair.prefiller.close()
    with pytest.raises(errors.HandoffError) as caught:
        fetch.result(PATIENCE)
    assert caught.value.clause in (errors.Cancelled.clause, errors.PeerLost.clause)
    with pytest.raises(errors.Cancelled):
        offer.wait(PATIENCE)
    assert eventually(lambda: pair.decoder.staging()[0] == 0)


def test_a_restarted_prefiller_is_used_again(pair, source, target):
    pair.prefiller.close()
    pair.decoder.close()
    with kept_port() as port:
        pair.prefiller = pair.new_prefiller(port)
        pair.decoder = pair.new_decoder()
        offer = parked(pair, source)
        pair.decoder.fetch(offer.ticket, pair.target(*target))
        (link,) = pair.decoder._links.values()
        pair.prefiller.close()
        assert eventually(lambda: link.lost)  # or what fails is the old connection
        fetch_fails(pair, offer.ticket, target, errors.CannotConnect)
        pair.prefiller = pair.new_prefiller(port)
        pair.steps.clear()
        pair.decoder.fetch(parked(pair, source).ticket, pair.target(*target))
    # One attempt and no waiting in between; how long that takes is measured with real processes, by tests/faults/test_restart.py.
    assert pair.steps.count("decoder connecting") == pair.steps.count("decoder connected") == 1
    assert everything_is_free(pair)


def test_the_decoder_shuts_down(pair, source, target):
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=Mode.STREAM)
    pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: "decoder granted" in pair.steps)
    pair.decoder.close()
    with pytest.raises(errors.HandoffError):
        offer.wait(PATIENCE)
    assert eventually(lambda: pair.prefiller.staging()[0] == 0)


def test_the_model_differs(pair, source, target):
    offer = parked(pair, source)
    with pytest.raises(errors.Refused) as caught:
        pair.decoder.fetch(offer.ticket, Target(*target, bytes(32)))
    assert caught.value.clause == errors.ModelDiffers.clause
    pair.decoder.fetch(offer.ticket, pair.target(*target))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: dict(first_token=TOKENS), errors.TokensMissing),
        (lambda t: dict(end_token=TOKENS + 1), errors.TokensMissing),
        (lambda t: dict(content=((ContentKind.TOKENS, token_digest([7])),)), errors.ContentDiffers),
    ],
)
def test_what_was_asked_for_is_not_what_is_offered(pair, source, target, change, kind):
    fetch_fails(pair, parked(pair, source).ticket, target, kind, **change(target))
    assert everything_is_free(pair)


def test_pages_of_another_shape(pair, source):
    from bridge.pages import LayerPages, PagedCache, PagesDoNotFit

    def cache(layers, heads, dim):
        pages = torch.zeros(4, 64, heads, dim, dtype=torch.bfloat16)
        return PagedCache({index: LayerPages.nhd(pages, pages.clone()) for index in range(layers)})

    cases = [
        (cache(LAYERS + 1, HEADS, 64), errors.LayersMissing),
        (cache(LAYERS, HEADS, 128), errors.HeadsDiffer),
        (cache(LAYERS, HEADS + 1, 64), errors.HeadsDiffer),
    ]
    for made, kind in cases:
        with pytest.raises(kind):
            pair.decoder.fetch(parked(pair, source).ticket, pair.target(made, block_table(64, 4, 1)))
    with pytest.raises(PagesDoNotFit):
        pair.decoder.fetch(parked(pair, source).ticket, pair.target(cache(LAYERS, HEADS, 64), block_table(64, 2, 1)))
    assert everything_is_free(pair)


def test_a_peer_that_is_not_configured(pair, target):
    fetch_fails(pair, Ticket("elsewhere", "r", 1, 1), target, errors.PeerUnknown)


def test_nobody_listens(pair, target):
    with kept_port() as port:
        pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", port)
        fetch_fails(pair, Ticket("prefill-0", "r", 1, 1), target, errors.CannotConnect)


def test_the_port_is_busy(pair):
    with pytest.raises(errors.CannotListen) as caught:
        pair.new_prefiller(pair.prefiller.port)
    assert str(pair.prefiller.port) in str(caught.value)


def test_every_failure_type_has_a_clause_of_its_own():
    from bridge.errors import all_error_types

    def types(root):
        return {root}.union(*(types(child) for child in root.__subclasses__()))

    own = [kind for kind in types(KVBridgeError) if kind is not errors.Refused and kind.__module__.startswith(("bridge.", "backends."))]
    clauses = [kind.clause for kind in own]
    assert sorted(clauses) == sorted(set(clauses))
    assert len(all_error_types()) >= len(own)


def test_what_the_configuration_gets_wrong_is_said(pair, tmp_path):
    from bridge.handoff import Identity, Prefiller
    from tests.handoff.local_agent import LocalAgent
    from tests.handoff.pair import CpuReferenceDevice

    (tmp_path / "no.pem").write_text("nothing")
    good, key = pair.prefill_identity.certificate, pair.prefill_identity.private_key
    cases = [
        (Identity("p", tmp_path / "missing.crt", key), {}, {}, errors.BadIdentity, "missing.crt"),
        (Identity("p", good, tmp_path / "missing.key"), {}, {}, errors.BadIdentity, "missing.key"),
        (Identity("p", good, pair.decode_identity.private_key), {}, {}, errors.BadIdentity, "prefill-0.crt"),
        (pair.prefill_identity, {"d": PeerConfig(tmp_path / "no.pem")}, {}, errors.BadIdentity, "no.pem"),
        (pair.prefill_identity, {}, {"staging_bytes": 0}, errors.StagingFull, "0 bytes"),
        (pair.prefill_identity, {}, {"port": 99999}, errors.CannotListen, "99999"),
    ]
    for identity, peers, settings, kind, words in cases:
        agent = LocalAgent()
        with pytest.raises(kind, match=words):
            Prefiller(identity, peers, CpuReferenceDevice(), agent, **{"staging_bytes": 1 << 20, **settings})
        assert agent.registered_bytes() == 0


def test_closing_right_after_a_hand_off_still_tells_the_prefiller(pair, source, target, monkeypatch):
    # How long they may take is the product's affair; here, that they are waited for.
    monkeypatch.setattr(decoder_module, "_LAST_COMMITS_SECONDS", PATIENCE)
    closed = []
    for _ in range(5):
        offer = parked(pair, source)
        pair.decoder.fetch(offer.ticket, pair.target(*target))
        pair.decoder.close()
        offer.wait(PATIENCE)
        closed.append(pair.decoder.counters.snapshot())
        pair.decoder = pair.new_decoder()
    assert all(counts["committed"] == 1 for counts in closed)
    assert not any("commit_unconfirmed" in name for counts in closed for name in counts)
    assert everything_is_free(pair)


def test_fetching_again_at_once_is_refused_by_the_prefiller(pair, source, target):
    offer = parked(pair, source)
    pair.decoder.fetch(offer.ticket, pair.target(*target))
    assert fetch_fails(pair, offer.ticket, target, errors.Refused).clause == errors.UnknownLease.clause


def test_a_commit_that_nobody_confirms_is_counted(pair, source, target, monkeypatch):
    pair.decoder.fetch(parked(pair, source).ticket, pair.target(*target))
    # The same bound holds for the answer to a claim, which the connection keeps as it was.
    pair.decoder.bounds = replace(BOUNDS, claim=0.3)
    offer = parked(pair, source)
    monkeypatch.setattr(Session, "released", lambda self, lease: None)
    pair.decoder.fetch(offer.ticket, pair.target(*target))
    assert eventually(lambda: pair.decoder.counters.snapshot().get("commit_unconfirmed{timeout}") == 1), pair.decoder.counters.snapshot()
    offer.wait(PATIENCE)


@pytest.mark.parametrize("wrong", [{"lease": 0}, {"claim": -1}, {"silence": float("nan")}, {"connect": float("inf")}, {"heartbeat": 7}])
def test_bounds_that_no_hand_off_can_keep(wrong):
    with pytest.raises(errors.BadBounds, match=next(iter(wrong))):
        Bounds(**wrong)
