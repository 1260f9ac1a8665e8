"""Several chunks of one payload are on their way at a time, and their landing is planned meanwhile; however it ends, nothing is left."""

import gc

import pytest

from bridge.handoff import Bounds, Target, errors
from bridge.pages import PagesDoNotFit
from bridge.transfer.errors import TransferTimeout
from tests.handoff.pair import MODEL, Pair, block_table, manifest, paged_cache, tokens_of
from tests.handoff.test_failures import TOKENS, eventually, everything_is_free, parked
from tests.handoff.test_staging_places import Ends, ToyAgent, ToyDevice, ends  # noqa: F401 (a fixture)


@pytest.fixture
def source():
    return paged_cache(16, 12, seed=1), block_table(16, 12, 2)


@pytest.fixture
def target():
    return paged_cache(64, 4, seed=None), block_table(64, 4, 3)


def test_as_many_reads_as_chunks_in_flight(pair, source, target):
    offer = parked(pair, source)
    pair.agent.gate.clear()
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    assert not eventually(lambda: pair.steps.count("decoder reading") > 2, seconds=0.2)
    assert "decoder arrived" not in pair.steps
    assert pair.decoder.staging()[0] == pytest.approx(2 * 32 / TOKENS * offer.payload_bytes, rel=0.05)
    pair.agent.gate.set()
    fetch.result(5)
    assert pair.steps.count("decoder landed") == 5
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()
    offer.wait(2)
    assert everything_is_free(pair)


@pytest.mark.parametrize("ending", ["cancelled here", "cancelled there"])
def test_all_that_are_under_way_are_given_up(pair, source, target, ending):
    offer = parked(pair, source)
    pair.agent.gate.clear()
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    held = pair.decoder.staging()[0]
    if ending == "cancelled here":
        fetch.cancel()
    else:
        offer.cancel()
    with pytest.raises((errors.Cancelled, errors.Refused)):
        fetch.result(5)
    # Both may still arrive: their memory is nobody else's until they have.
    assert pair.decoder.quarantined() == held
    assert pair.decoder.counters.snapshot()["quarantined"] == 2
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.quarantined() == 0)
    assert everything_is_free(pair)


def test_the_bound_of_a_transfer_holds_for_each(tmp_path, source, target):
    pair = Pair(tmp_path, bounds=Bounds(transfer=0.3, heartbeat=0.5, silence=4))
    offer = parked(pair, source)
    pair.agent.gate.clear()
    with pytest.raises(TransferTimeout):
        pair.decoder.fetch(offer.ticket, pair.target(*target))
    assert pair.decoder.counters.snapshot()["quarantined"] == 2
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.quarantined() == 0)
    assert everything_is_free(pair)
    pair.close()


def test_the_times_of_reads_that_overlap_are_counted_once(pair, source, target):
    received = pair.decoder.fetch(parked(pair, source).ticket, pair.target(*target))
    assert 0 < received.transfer <= received.total


class PlanningDevice(ToyDevice):
    """Counts what was planned and what was called; a plan fails where the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = self.called = 0
        self.fails = False

    def landing(self, *arguments, after=None):
        if self.fails:
            raise PagesDoNotFit("the test says so")
        self.planned += 1
        call = super().landing(*arguments, after=after)

        def counted() -> None:
            self.called += 1
            call()

        return counted


def started(ends, device):  # noqa: F811
    agent = ToyAgent()
    prefiller = ends.prefiller(device, agent)
    source, target = (paged_cache(16, 12, seed=1), block_table(16, 12, 2)), (paged_cache(64, 4, seed=None), block_table(64, 4, 3))
    offer = prefiller.offer(manifest("r", TOKENS), *source)
    offer.advance(TOKENS)
    agent.gate.clear()
    decoder = ends.decoder(prefiller, device, agent)
    return agent, offer, decoder, decoder.start(offer.ticket, Target(*target, MODEL)), source, target


def test_landing_is_planned_while_the_bytes_are_on_their_way(ends):  # noqa: F811
    device = PlanningDevice()
    agent, offer, _, fetch, source, target = started(ends, device)
    assert eventually(lambda: device.planned == 2)
    assert device.called == 0
    agent.gate.set()
    fetch.result(5)
    offer.wait(2)
    assert device.planned == device.called == 5
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()


def test_a_plan_that_fails_fails_the_hand_off(ends, caplog):  # noqa: F811
    device = PlanningDevice()
    device.fails = True
    agent, offer, decoder, fetch, _, _ = started(ends, device)
    agent.gate.set()
    with pytest.raises(PagesDoNotFit):
        fetch.result(5)
    with pytest.raises(errors.Refused):
        offer.wait(2)
    assert eventually(lambda: decoder.staging()[0] == 0)
    gc.collect()
    assert not caplog.records, "an exception of a plan that nobody asked for was reported as overlooked"
