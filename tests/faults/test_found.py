"""Faults that were found in the hand-off, each with the test that failed before it was mended."""

import asyncio
import contextlib
import gc
import socket
import struct
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bridge.counters import MAX_NAMES, Counters
from bridge.handoff import Mode, PeerConfig, Target, errors, messages
from bridge.handoff.bounds import Bounds, ignore
from bridge.handoff.compatibility import check_chunks
from bridge.handoff.identity import client_context
from bridge.handoff.leases import REMEMBERED, Leases
from bridge.handoff.link import Receiving
from bridge.handoff.loop import LoopThread
from bridge.handoff.move import Move, Resources, Wanted
from bridge.handoff.session import MAX_UNSENT, Session
from bridge.handoff.staging import ALIGNMENT, Staging, StagingPool
from bridge.pages import BlockTable, CacheGroup, LayerPages, PagedCache
from bridge.transfer.errors import TransferFailed
from bridge.wire import Coding, CodingKind, ContentKind, Element, Group, Layer, Manifest, PayloadMap, SlotCodec
from bridge.wire.errors import TooLarge
from tests.handoff.pair import BOUNDS, MODEL, TOKENS, CpuReferenceDevice, Pair, everything_is_free, manifest
from tests.waiting import PATIENCE, eventually


class HostileDecoder:
    """Speaks the control protocol by hand, with the decoder's certificate."""

    def __init__(self, pair):
        raw = socket.create_connection(("127.0.0.1", pair.prefiller.port), timeout=PATIENCE)
        self.socket = client_context(pair.decode_identity, PeerConfig(pair.prefill_identity.certificate)).wrap_socket(raw)
        self.say(messages.Hello(messages.PROTOCOL_MAJOR, 0, "local"))
        assert isinstance(self.hear(), messages.Welcome)

    def say(self, message):
        body = messages.encode(message)
        self.socket.sendall(struct.pack("<I", len(body)) + body)

    def hear(self):
        (size,) = struct.unpack("<I", self._exactly(4))
        return messages.decode(self._exactly(size))

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data


@pytest.mark.parametrize("mode", list(Mode))
def test_a_commit_before_everything_was_taken_is_no_commit(pair, source, mode):
    """It freed the extents of chunks that were still to be packed: the engine's next `advance` raised KeyError."""
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source, mode=mode)
    hostile, ticket = HostileDecoder(pair), offer.ticket
    hostile.say(messages.Claim(1, "r", messages.u64(ticket.lease), ticket.generation, 0, 1, MODEL))
    assert isinstance(hostile.hear(), messages.Grant)
    hostile.say(messages.Commit(messages.u64(ticket.lease), ticket.generation))
    assert eventually(lambda: pair.prefiller.live_leases() == 0)
    with pytest.raises(errors.ProtocolError):
        offer.advance(TOKENS)
    with pytest.raises(errors.ProtocolError):
        offer.wait(PATIENCE)
    assert pair.prefiller.counters.snapshot()["failed{protocol}"] == 1
    assert "committed" not in pair.prefiller.counters.snapshot()
    assert everything_is_free(pair)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_giving_up_before_the_grant_comes_frees_the_lease_at_once(tmp_path, source, target, monkeypatch, how):
    """The prefiller kept the whole payload until the lease ran out: a minute, by default."""
    pair = Pair(tmp_path, bounds=replace(BOUNDS, claim=0.3 if how == "timeout" else PATIENCE))
    monkeypatch.setattr(Session, "grant", lambda *arguments: None)
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
    offer.advance(TOKENS)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    assert eventually(lambda: "prefiller claimed" in pair.steps)
    if how == "cancel":
        fetch.cancel()
    with pytest.raises(errors.HandoffError) as caught:
        fetch.result(PATIENCE)
    assert caught.value.clause == {"cancel": errors.Cancelled, "timeout": errors.HandoffTimeout}[how].clause
    with pytest.raises(errors.Refused) as told:
        offer.wait(PATIENCE)
    assert told.value.clause == caught.value.clause
    assert everything_is_free(pair)
    pair.close()


class SlowDevice(CpuReferenceDevice):
    """Lands when the test says so."""

    def __init__(self):
        self.entered, self.go = threading.Event(), threading.Event()

    def land(self, *arguments, **more):
        self.entered.set()
        self.go.wait(PATIENCE)
        super().land(*arguments, **more)


def test_cancelling_twice_does_not_give_pages_back_that_are_being_written(pair, source, target):
    """The second cancellation ended the wait for the thread that lands: pages and staging were reused while it wrote and read them."""
    pair.decoder.close()
    device = SlowDevice()
    pair.decoder = decoder = pair.new_decoder(device)
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
    offer.advance(TOKENS)
    fetch = decoder.start(offer.ticket, pair.target(*target))
    assert device.entered.wait(PATIENCE)
    for _ in range(3):
        fetch.cancel()
        time.sleep(0.05)
    assert not fetch.done(), "the pages belong to the hand-off until it is done"
    assert decoder.staging()[0] > 0
    device.go.set()
    with pytest.raises(errors.Cancelled):
        fetch.result(PATIENCE)
    assert everything_is_free(pair)


def test_fetches_from_a_prefiller_that_does_not_answer_do_not_queue_up(pair, target):
    """Each tried to connect for itself, one after the other: the hundredth failed after a hundred times the bound."""
    deaf = socket.create_server(("127.0.0.1", 0), backlog=64)
    pair.decoder.close()
    pair.bounds = replace(BOUNDS, connect=0.5)
    pair.decoder = pair.new_decoder()
    pair.decoder._peers["prefill-0"] = PeerConfig(pair.prefill_identity.certificate, "127.0.0.1", deaf.getsockname()[1])
    fetches = [pair.decoder.start(offered_elsewhere(number), pair.target(*target)) for number in range(20)]
    for fetch in fetches:
        with pytest.raises(errors.CannotConnect):
            fetch.result(PATIENCE)
    # One attempt for all of them. A machine that stands still between two starts may see another.
    assert pair.steps.count("decoder connecting") <= 5
    assert pair.decoder.counters.snapshot()["failed{cannot_connect}"] == 20
    deaf.close()


def offered_elsewhere(number):
    from bridge.handoff import Ticket

    return Ticket("prefill-0", f"r{number}", number + 1, 1)


def test_ended_leases_keep_no_frames_and_few_bytes(pair, source):
    """A remembered failure held its traceback, that the frames, and those whatever the engine had in hand: up to 65,536 times."""

    class InHand:
        pass

    def engine_step():
        in_hand = InHand()
        seen.append(weakref.ref(in_hand))
        offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
        offer.cancel()
        with contextlib.suppress(errors.Cancelled):
            offer.wait(PATIENCE)

    seen = []
    engine_step()
    gc.collect()
    assert seen[0]() is None


def test_what_is_remembered_of_the_past_is_bounded():
    leases = Leases(StagingPool(ALIGNMENT), Counters(), Bounds(), ignore, lambda *arguments: None)
    for number in range(REMEMBERED + 100):
        leases.next_number(f"r{number}")
    assert len(leases._requests) == REMEMBERED
    assert leases.next_number(f"r{REMEMBERED}")[1] == 2


class BrokenDevice(CpuReferenceDevice):
    def land(self, *arguments, **more):
        raise RuntimeError("the driver is gone")

    pack = land


def test_a_device_that_fails_while_landing_is_a_typed_failure_on_both_sides(pair, source, target):
    """It was raised as it came, and counted nowhere."""
    pair.decoder.close()
    pair.decoder = pair.new_decoder(BrokenDevice())
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
    offer.advance(TOKENS)
    with pytest.raises(errors.Unexpected, match="the driver is gone") as caught:
        pair.decoder.fetch(offer.ticket, pair.target(*target))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert pair.decoder.counters.snapshot()["failed{unexpected}"] == 1
    with pytest.raises(errors.Refused) as told:
        offer.wait(PATIENCE)
    assert told.value.clause == errors.Unexpected.clause
    assert everything_is_free(pair)


def test_a_device_that_fails_while_packing_is_a_typed_failure_on_both_sides(pair, source, target):
    pair.prefiller.close()
    pair.decoder.close()
    pair.prefiller = pair.new_prefiller(device=BrokenDevice())
    pair.decoder = pair.new_decoder()
    offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
    fetch = pair.decoder.start(offer.ticket, pair.target(*target))
    with pytest.raises(errors.PackingFailed, match="the driver is gone") as caught:
        offer.advance(TOKENS)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(errors.Refused) as told:
        fetch.result(PATIENCE)
    assert told.value.clause == errors.PackingFailed.clause
    assert pair.prefiller.counters.snapshot()["failed{packing_failed}"] == 1
    assert everything_is_free(pair)


def test_one_request_offered_by_many_threads_leaves_one_lease(pair, source):
    """An offer that another one replaced in the table was never ended, and its staging memory never freed."""
    offers, together = [], threading.Barrier(8)

    def offer_it():
        for _ in range(10):
            together.wait(PATIENCE)
            with contextlib.suppress(errors.StaleGeneration, errors.StagingFull):
                offers.append(pair.prefiller.offer(manifest("r", 64), *source))

    threads = [threading.Thread(target=offer_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert pair.prefiller.live_leases() == 1
    for offer in offers:
        offer.cancel()
    assert everything_is_free(pair)


def test_an_offer_that_came_between_is_ended_by_the_later_one(pair, source, monkeypatch):
    """The same, with the race laid out: at first sight there is no earlier offer, and then there is."""
    first = pair.prefiller.offer(manifest("r", TOKENS), *source)
    leases, looked = pair.prefiller._leases, []
    revoke = leases.revoke_earlier

    def too_early(lease):
        looked.append(lease)
        if len(looked) > 1:
            revoke(lease)

    monkeypatch.setattr(leases, "revoke_earlier", too_early)
    second = pair.prefiller.offer(manifest("r", TOKENS), *source)
    with pytest.raises(errors.StaleGeneration):
        first.wait(PATIENCE)
    assert pair.prefiller.live_leases() == 1
    second.cancel()
    assert everything_is_free(pair)


def test_starting_while_closing_never_leaves_a_fetch_that_does_not_end(tmp_path, target):
    """A fetch that was started as the loop ended waited for ever."""
    pair = Pair(tmp_path)
    fetches, refused = [], []

    def start_many():
        try:
            while True:
                fetches.append(pair.decoder.start(offered_elsewhere(len(fetches)), pair.target(*target)))
        except errors.Cancelled as error:
            refused.append(error)

    thread = threading.Thread(target=start_many)
    thread.start()
    assert eventually(lambda: len(fetches) > 10)
    pair.decoder.close()
    thread.join(PATIENCE)
    assert refused
    for fetch in fetches:
        with pytest.raises(errors.HandoffError):
            fetch.result(PATIENCE)
        fetch.cancel()
    pair.close()


def test_a_fetch_that_starts_as_the_loop_ends_is_refused(pair, target, monkeypatch):
    """The same, with the race laid out: the decoder is open when it is asked, and closed when its loop is."""
    entered, closed, start, ended = threading.Event(), threading.Event(), LoopThread.start, []

    def late(loop, coroutine):
        entered.set()
        closed.wait(PATIENCE)
        return start(loop, coroutine)

    def start_it():
        try:
            pair.decoder.start(offered_elsewhere(1), pair.target(*target)).result(PATIENCE)
        except Exception as error:
            ended.append(type(error))

    monkeypatch.setattr(LoopThread, "start", late)
    thread = threading.Thread(target=start_it)
    thread.start()
    assert entered.wait(PATIENCE)
    pair.decoder.close()
    closed.set()
    thread.join(2 * PATIENCE)
    assert ended == [errors.Cancelled]


def test_room_is_given_in_the_order_in_which_it_was_asked_for():
    """Whoever polled at the right moment got it: small chunks kept a large one waiting until it failed."""
    pool, got = StagingPool(4 * ALIGNMENT), []
    first = [pool.try_take(ALIGNMENT) for _ in range(4)]

    async def ask(resources, name, pages):
        extent = await resources.take_staging(pages * ALIGNMENT)
        got.append(name)
        return extent

    async def all_of_them():
        staging = Staging(pool, None, None)
        resources = Resources(None, None, staging, asyncio.Lock(), None, 2, BOUNDS, Counters(), ignore, lambda: True)
        asked = [asyncio.create_task(ask(resources, "large", 3))]
        await asyncio.sleep(0.01)
        asked += [asyncio.create_task(ask(resources, f"small {number}", 1)) for number in range(2)]
        for extent in first:
            pool.give_back(extent)
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*asked[:2]), PATIENCE)
        asked[2].cancel()

    asyncio.run(all_of_them())
    assert got == ["large", "small 0"]


def test_a_decoder_that_does_not_read_its_answers_is_not_asked_for_more():
    """Its claims were read and answered without end, and the answers kept in memory."""

    class Deaf:
        peer = "decode-0"
        received = 0

        async def receive(self, timeout):
            await asyncio.sleep(0)
            self.received += 1
            return messages.Claim(self.received, "r", bytes(8), 1, 0, 1, MODEL)

        async def send(self, message):
            await asyncio.sleep(60)

    async def serve():
        channel = Deaf()
        leases = Leases(StagingPool(ALIGNMENT), Counters(), BOUNDS, ignore, lambda *arguments: None)
        session = Session(channel, leases, lambda: None, BOUNDS, ignore)
        receiving = asyncio.create_task(session._receive())
        sending = asyncio.create_task(session._send_outbox())
        for _ in range(3 * MAX_UNSENT):
            await asyncio.sleep(0)
        receiving.cancel()
        sending.cancel()
        return channel.received

    assert MAX_UNSENT <= asyncio.run(serve()) <= MAX_UNSENT + 2


def far_layers(count):
    """A manifest whose layer 0 has 16 tokens and whose other layers lie 2**24 tokens away: 2**20 chunks, nearly all without tokens."""
    raw = Coding(CodingKind.RAW, 16, Element.BF16)
    return Manifest(
        model_digest=MODEL,
        content=((ContentKind.TOKENS, bytes(32)),),
        request_id="far",
        lease=1,
        generation=1,
        chunk_tokens=16,
        groups=(Group(1, 16, 0, 16), Group(1, 16, (1 << 24) - 16, 1 << 24)),
        codecs=(SlotCodec(raw, raw),),
        layers=tuple(Layer(index, int(index > 0), 0) for index in range(count)),
    )


def test_chunks_that_nobody_here_holds_do_not_keep_the_loop_busy(monkeypatch):
    """1,024 layers in a grant of 17 KB made each chunk cost a millisecond, and no other task of the decoder ran meanwhile."""
    chunks, made = 1000, far_layers(1024)
    made.check()
    side = torch.zeros((1, 16, 1, 16), dtype=torch.bfloat16)
    group = CacheGroup(PagedCache({0: LayerPages.nhd(side, side)}), BlockTable([0], 16))
    receiving = Receiving()
    receiving.slots.update(dict.fromkeys(range(chunks), 0))
    taken, turns, seen, looked_at = [], 0, {}, []
    chunk_of = PayloadMap.chunk
    monkeypatch.setattr(PayloadMap, "chunk", lambda self, index: looked_at.append(index) or chunk_of(self, index))

    async def take(ticket, chunk):
        taken.append(chunk)
        seen[chunk] = turns

    async def run():
        nonlocal turns
        link = SimpleNamespace(taken=take)
        resources = SimpleNamespace(bounds=replace(BOUNDS, chunk=0.3), observe=ignore, depth=2)
        # Nothing of chunk 0 is wanted either, so that nothing is transferred.
        move = Move(resources, link, receiving, Wanted(None, made, None, (group,), 16, 17, {}))

        async def count():
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        with pytest.raises(errors.HandoffTimeout):
            await move._read_all()  # of the chunks that are not ready
        counting.cancel()

    asyncio.run(run())
    assert taken == list(range(chunks))
    assert seen[chunks - 1] - seen[0] == chunks - 1, "others have their turn after each"
    assert looked_at == [0], "the layers of no other chunk cost anything"


def test_a_payload_of_more_chunks_than_messages_can_name_is_refused_before_a_read():
    near = far_layers(1)
    check_chunks(PayloadMap(replace(near, groups=near.groups[:1])))
    with pytest.raises(TooLarge, match="1048576 chunks"):
        check_chunks(PayloadMap(far_layers(2)))


def test_clauses_that_a_peer_makes_up_do_not_become_names():
    counters = Counters()
    for number in range(2000):
        counters.add("failed", errors.Refused(f"made_up_{number}", "detail", "", "decode-0").clause)
        counters.add("failed", errors.Refused(f"x{number}}}\n# HELP", "detail", "", "decode-0").clause)
    counts = counters.snapshot()
    assert len(counts) <= MAX_NAMES + 1
    assert sum(counts.values()) == 4000
    assert not any("\n" in name for name in counts)
    counters.add("failed", "bad_tag")
    assert sum(counters.snapshot().values()) == 4001


def test_a_data_port_that_failed_while_the_control_channel_lived_is_connected_anew(pair, source, target):
    """As after a cut, or an idle hour behind a firewall, that only the control channel outlives: every later hand-off failed."""

    def cross():
        offer = pair.prefiller.offer(manifest("r", TOKENS), *source)
        offer.advance(TOKENS)
        pair.decoder.fetch(offer.ticket, Target(*target, MODEL))
        offer.wait(PATIENCE)

    def refuse(*_):
        raise TransferFailed("the connection had failed")

    cross()
    (dead,) = pair.decoder._links.values()
    dead.endpoint.read, dead.endpoint.failure = refuse, "its endpoint failed"
    cross()
    (link,) = pair.decoder._links.values()
    assert link.endpoint.failure is None
    assert eventually(lambda: link is dead or (dead.lost is not None and dead.endpoint.disconnected))
    assert "failed{transfer_failed}" not in pair.decoder.counters.snapshot()
    assert pair.decoder.staging()[0] == 0
