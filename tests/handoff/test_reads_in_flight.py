"""Several chunks of one payload are on their way at a time, and their landing is planned meanwhile; however it ends, nothing is left."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.devices import DeviceWithMemory, PlansLandings
from bridge.handoff import Decoder, Fetch, Prefiller, Target, errors
from bridge.handoff.link import Link
from bridge.pages import PagesDoNotFit
from bridge.transfer.errors import TransferTimeout
from bridge.wire.errors import BadTag
from tests.handoff.pair import BOUNDS, MODEL, TOKENS, Pair, block_table, everything_is_free, manifest, paged_cache, parked, tokens_of
from tests.handoff.toy import ToyAgent, ToyDevice
from tests.waiting import PATIENCE, eventually


def test_as_many_reads_as_chunks_in_flight(pair, source, target):
    offer = parked(pair, source)
    pair.agent.gate.clear()
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    assert not eventually(lambda: pair.steps.count("decoder reading") > 2, seconds=0.2)
    assert "decoder arrived" not in pair.steps
    assert pair.decoder.staging()[0] == pytest.approx(2 * 32 / TOKENS * offer.payload_bytes, rel=0.05)
    pair.agent.gate.set()
    fetch.result(PATIENCE)
    assert pair.steps.count("decoder landed") == 5
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()
    offer.wait(PATIENCE)
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
        fetch.result(PATIENCE)
    # Both may still arrive: their memory is nobody else's until they have.
    assert pair.decoder.quarantined() == held
    assert pair.decoder.counters.snapshot()["quarantined"] == 2
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.quarantined() == 0)
    assert everything_is_free(pair)


def test_the_bound_of_a_transfer_holds_for_each(tmp_path, source, target):
    pair = Pair(tmp_path, bounds=replace(BOUNDS, transfer=0.3))
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
    pair.agent.gate.clear()
    fetch = pair.decoder.start(parked(pair, source).ticket, pair.target(*target))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    time.sleep(0.5)  # for which both are under way: counted twice, they take longer than everything together
    pair.agent.gate.set()
    received = fetch.result(PATIENCE)
    assert 0.5 < received.transfer <= received.total


class PlanningDevice(ToyDevice):
    """Counts what was planned and what was called; a plan fails where the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = self.called = 0
        self.called_on: list[str] = []
        self.fails = False
        self.short: bool | None = True
        self.before_landing: Callable[[], None] = lambda: None

    def landing(self, *arguments, after=None):
        if self.fails:
            raise PagesDoNotFit("the test says so")
        self.planned += 1
        call = super().landing(*arguments, after=after)

        def counted(data) -> None:
            self.called += 1
            self.called_on.append(threading.current_thread().name)
            self.before_landing()
            call(data)

        if self.short is not None:
            counted.short = lambda: self.short
        return counted


def started(ends, device):
    agent = ToyAgent()
    prefiller = ends.prefiller(device, agent)
    source, target = (paged_cache(16, 12, seed=1), block_table(16, 12, 2)), (paged_cache(64, 4, seed=None), block_table(64, 4, 3))
    offer = prefiller.offer(manifest("r", TOKENS), *source)
    offer.advance(TOKENS)
    agent.gate.clear()
    decoder = ends.decoder(prefiller, device, agent)
    return agent, offer, decoder, decoder.start(offer.ticket, Target(*target, MODEL)), source, target


def test_landing_is_planned_while_the_bytes_are_on_their_way(ends):
    device = PlanningDevice()
    agent, offer, _, fetch, source, target = started(ends, device)
    assert eventually(lambda: device.planned == 2)
    assert device.called == 0
    agent.gate.set()
    fetch.result(PATIENCE)
    offer.wait(PATIENCE)
    assert device.planned == device.called == 5
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()


def test_the_first_landing_is_planned_before_its_chunk_is_packed(ends):
    device, agent = PlanningDevice(), ToyAgent()
    prefiller = ends.prefiller(device, agent)
    source, target = (paged_cache(16, 12, seed=1), block_table(16, 12, 2)), (paged_cache(64, 4, seed=None), block_table(64, 4, 3))
    offer = prefiller.offer(manifest("r", TOKENS), *source)
    decoder = ends.decoder(prefiller, device, agent)
    fetch = decoder.start(offer.ticket, Target(*target, MODEL))
    assert eventually(lambda: device.planned == 1)
    assert decoder.staging()[0] == 0, "room was taken for a chunk that nobody has packed"
    offer.advance(TOKENS)
    fetch.result(PATIENCE)
    assert device.planned == device.called == 5
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()


def test_a_plan_that_fails_is_noticed_before_its_chunk_is_packed(ends):
    device, agent = PlanningDevice(), ToyAgent()
    device.fails = True
    prefiller = ends.prefiller(device, agent)
    offer = prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
    decoder = ends.decoder(prefiller, device, agent)
    with pytest.raises(PagesDoNotFit):
        decoder.fetch(offer.ticket, Target(paged_cache(64, 4, seed=None), block_table(64, 4, 3), MODEL))
    with pytest.raises(errors.Refused):
        offer.wait(PATIENCE)


def test_a_lone_fetch_wakes_no_landing_thread(ends):
    device, agent = PlanningDevice(), ToyAgent()
    prefiller = ends.prefiller(device, agent)
    decoder = ends.decoder(prefiller, device, agent)

    def begun(name: str) -> Fetch:
        offer = prefiller.offer(manifest(name, TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
        offer.advance(TOKENS)
        return decoder.start(offer.ticket, Target(paged_cache(64, 4, seed=None), block_table(64, 4, 3), MODEL))

    begun("alone").result(PATIENCE)
    assert {name.split("_")[0] for name in device.called_on} == {"kvbridge-decoder-decode-0"}
    device.called_on.clear()
    agent.gate.clear()
    fetches = [begun("one"), begun("other")]
    assert eventually(lambda: device.planned >= 4)
    agent.gate.set()
    for fetch in fetches:
        fetch.result(PATIENCE)
    assert any(name.startswith("kvbridge-land") for name in device.called_on), "landings held the loop up for another fetch"


@pytest.mark.parametrize("says", [False, None], ids=["not short", "says nothing"])
def test_a_landing_that_may_take_long_keeps_no_heartbeat_back(ends, says):
    device = PlanningDevice()
    device.short = says
    agent, offer, _, fetch, _, _ = started(ends, device)
    agent.gate.set()
    fetch.result(PATIENCE)
    offer.wait(PATIENCE)
    assert device.called == 5
    assert all(name.startswith("kvbridge-land") for name in device.called_on), "a landing that may wait or compile held the loop up"


@pytest.mark.parametrize("ending", ["refused", "given up"])
def test_a_landing_on_the_loop_that_does_not_end_well_leaves_nothing(ends, ending):
    device, landing, go_on = PlanningDevice(), threading.Event(), threading.Event()

    def before() -> None:
        landing.set()
        go_on.wait(PATIENCE)
        if ending == "refused":
            raise BadTag("the test says so")

    device.before_landing = before
    agent, offer, decoder, fetch, source, target = started(ends, device)
    agent.gate.set()
    assert landing.wait(PATIENCE)
    if ending == "given up":
        fetch.cancel()
    go_on.set()
    with pytest.raises(BadTag if ending == "refused" else errors.Cancelled):
        fetch.result(PATIENCE)
    with pytest.raises(errors.Refused):
        offer.wait(PATIENCE)
    assert device.called == 1
    assert not device.called_on[0].startswith("kvbridge-land")
    assert eventually(lambda: decoder.staging()[0] == 0)
    device.before_landing = lambda: None
    (prefiller,) = (end for end in ends.open if isinstance(end, Prefiller))
    again = prefiller.offer(manifest("again", TOKENS), *source)
    again.advance(TOKENS)
    decoder.fetch(again.ticket, Target(*target, MODEL))
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()


def test_a_plan_that_fails_fails_the_hand_off(ends, caplog):
    device = PlanningDevice()
    device.fails = True
    agent, offer, decoder, fetch, _, _ = started(ends, device)
    agent.gate.set()
    with pytest.raises(PagesDoNotFit):
        fetch.result(PATIENCE)
    with pytest.raises(errors.Refused):
        offer.wait(PATIENCE)
    assert eventually(lambda: decoder.staging()[0] == 0)
    gc.collect()
    assert not caplog.records, "an exception of a plan that nobody asked for was reported as overlooked"


def test_no_chunk_in_flight_is_refused(pair):
    with pytest.raises(errors.BadBounds, match="0 chunks"):
        Decoder(pair.decode_identity, {}, CpuReferenceDevice(), pair.agent, staging_bytes=1 << 20, chunks_in_flight=0)


def test_memory_in_quarantine_keeps_no_pages(pair, source):
    offer, made = parked(pair, source), (paged_cache(64, 4, seed=None), block_table(64, 4, 3))
    alive = weakref.ref(made[0].layers[0].key)
    pair.agent.gate.clear()
    fetch = pair.decoder.start(offer.ticket, pair.target(*made))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    fetch.cancel()
    with pytest.raises(errors.Cancelled) as caught:
        fetch.result(PATIENCE)
    assert caught.value.__cause__ is None, "what an engine itself gave up was logged with twenty lines of asyncio"
    del caught, fetch, made
    assert eventually(lambda: gc.collect() >= 0 and alive() is None)
    assert pair.decoder.quarantined() > 0
    pair.agent.gate.set()
    assert eventually(lambda: pair.decoder.quarantined() == 0)


def test_a_device_with_memory_need_not_plan(ends):
    def land(self, *arguments, after=None) -> None:
        self.afters.append(after)
        CpuReferenceDevice.land(self, *arguments)

    # As a device was written before landings could be planned.
    kept = {name: value for name, value in vars(ToyDevice).items() if name not in ("landing", "__dict__", "__weakref__")}
    device = type("Earlier", (CpuReferenceDevice,), {**kept, "land": land, "pack": PackingEarlier.pack})()
    assert isinstance(device, DeviceWithMemory)
    assert not isinstance(device, PlansLandings)
    agent, offer, _, fetch, source, target = started(ends, device)
    agent.gate.set()
    fetch.result(PATIENCE)
    offer.wait(PATIENCE)
    assert (tokens_of(*target, TOKENS) == tokens_of(*source, TOKENS)).all()
    assert None not in device.afters


class PackingEarlier:
    def pack(self, *arguments, after=None) -> None:
        self.afters.append(after)
        CpuReferenceDevice.pack(self, *arguments)


def test_a_data_port_that_failed_takes_no_other_hand_off_with_it(pair, source, target):
    first = parked(pair, source)
    pair.agent.gate.clear()
    running = pair.decoder.start(first.ticket, pair.target(*target))
    assert eventually(lambda: pair.steps.count("decoder reading") == 2)
    next(iter(pair.decoder._links.values())).endpoint.failure = "the test says so"
    second = pair.prefiller.offer(manifest("other", TOKENS), *source)
    second.advance(TOKENS)
    other = pair.decoder.start(second.ticket, pair.target(paged_cache(64, 4, seed=None), block_table(64, 4, 3)))
    assert eventually(lambda: pair.steps.count("decoder connected") == 2)
    pair.agent.gate.set()
    running.result(PATIENCE)
    other.result(PATIENCE)
    first.wait(PATIENCE)
    second.wait(PATIENCE)
    assert "commit_unconfirmed" not in " ".join(pair.decoder.counters.snapshot())


def test_a_commit_that_is_cut_short_is_counted(pair, source, target, monkeypatch):
    async def never(self, ticket):
        await asyncio.Event().wait()

    monkeypatch.setattr(Link, "commit", never)
    pair.decoder.fetch(parked(pair, source).ticket, pair.target(*target))
    pair.decoder.close()
    assert pair.decoder.counters.snapshot()["commit_unconfirmed{cancelled}"] == 1
