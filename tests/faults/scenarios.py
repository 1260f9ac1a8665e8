"""The fault table: every fault at every step at which it can meet a hand-off, as a function that injects it and has both ends judged."""

from __future__ import annotations

import errno
import io
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.handoff import Mode, Target
from bridge.handoff.staging import ALIGNMENT
from bridge.shares import chunk_share
from bridge.wire import PayloadMap, TagKeys, new_key, write_container
from bridge.wire.container import read_stream, verify_contents
from bridge.wire.errors import WireError
from tests.faults.faulty_agent import DATA_FAULTS
from tests.faults.faulty_channel import MESSAGE_FAULTS, MESSAGES
from tests.faults.proxy import LINK_FAULTS
from tests.faults.rig import (
    CHUNK_TOKENS,
    CHUNKS,
    PATIENCE,
    POISON,
    TOKENS,
    Ended,
    Handoff,
    Rig,
    Wrong,
    judge_failure,
    outcome,
    source_pages,
)
from tests.handoff.pair import MODEL, manifest, paged_cache

CHUNK_STEPS = {"first chunk": 0, "middle chunk": 1, "last chunk": 2}
DECODER_STEPS = ("claiming", "granted", "reading", "arrived", "landed", "commit_sent")
PREFILLER_STEPS = ("claimed", "packed", "taken", "committed")
STEPS = (*(f"prefiller {step}" for step in PREFILLER_STEPS), *(f"decoder {step}" for step in DECODER_STEPS))
BEFORE_THE_END = tuple(step for step in STEPS if step not in ("prefiller committed", "decoder landed", "decoder commit_sent"))
CONNECT_STEPS = ("decoder connecting", "decoder connected")

Run = Callable[[Rig, str, random.Random], tuple[list[Ended], bool]]
"""run(rig, step, rng) -> what the ends of each hand-off said, and whether the fault was met."""


@dataclass(frozen=True)
class Fault:
    name: str
    meaning: str
    steps: tuple[str, ...]
    run: Run


def _whole(rig: Rig, rng: random.Random) -> list[Ended]:
    return [rig.end(rig.start(rig.begin(rng)))]


def _data(kind: str) -> Run:
    def run(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
        rig.agent.arm(kind, CHUNK_STEPS[step], rng, rig.elsewhere)
        ended = _whole(rig, rng)
        met = rig.agent.met
        if kind == "hang" and met and rng.random() < 0.5:
            # Other hand-offs go on beside what is in quarantine, and do not get its memory.
            rig.agent.arm(None)
            ended += _whole(rig, rng)
        rig.agent.heal()
        return ended, met

    return run


def _message(kind: str) -> Run:
    def run(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
        if step in ("Hello", "Welcome"):
            disconnect(rig)
        rig.tamper.arm(kind, step, rng.randrange(CHUNKS) if step in ("Ready", "Taken") else 0, rng)
        ended = [rig.end(rig.start(rig.begin(rng, mode=Mode.STREAM if step == "Ready" else None)))]
        return ended, rig.tamper.met

    return run


def _link(kind: str) -> Run:
    def run(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
        if step in CONNECT_STEPS:
            disconnect(rig)
        rig.proxy.met = False
        rig.at[step] = lambda: rig.proxy.fail(kind)
        ended = _whole(rig, rng)
        return ended, rig.proxy.met or rig.met

    return run


def disconnect(rig: Rig) -> None:
    """So that the next hand-off connects anew."""
    rig.proxy.heal()
    deadline = time.monotonic() + PATIENCE
    while any(link.lost is None for link in list(rig.decoder._links.values())):
        if time.monotonic() > deadline:
            raise Wrong("a connection that was reset is still in use")
        time.sleep(0.001)


def _at(action: Callable[[Rig, Handoff, random.Random], list[Handoff]], mode: Mode | None = None) -> Run:
    """Runs the action in another thread when the hand-off comes to the step; it may return hand-offs of its own."""

    def run(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
        made, acting = rig.begin(rng, mode=mode), []

        def act() -> list[Handoff]:
            made.started.wait(PATIENCE)
            return action(rig, made, rng)

        rig.at[step] = lambda: acting.append(rig.threads.submit(act))
        ended = [rig.end(rig.start(made))]
        if rig.at.pop(step, None) is None:
            # It came, perhaps at this very moment: what it began must not go on beside the next run.
            deadline = time.monotonic() + PATIENCE
            while not acting and time.monotonic() < deadline:
                time.sleep(0.001)
        met = bool(acting)
        ended += [rig.end(other) for more in acting for other in more.result(PATIENCE)]
        return ended, met

    return run


def _cancel_decoder(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    for _ in range(rng.randrange(1, 4)):
        made.fetch.cancel()
    return []


def _cancel_prefiller(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    made.offer.cancel()
    return []


def _offer_anew(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    return [rig.start(rig.begin(rng))]


def _expiry(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """The lease runs out while a read of one of its chunks does not come."""
    rig.agent.arm("drop", rng.randrange(CHUNKS), rng)
    return _at(_expire)(rig, step, rng)


def _expire(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    while made.offer._lease.live:
        made.offer._lease.deadline = 0.0
        time.sleep(0.002)
    return []


def _restart_prefiller(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    held = rig.bystander
    rig.prefiller.close()
    if held._lease.live:
        raise Wrong("a lease outlived its prefiller")
    rig.prefiller = rig.new_prefiller()
    rig.park_bystander()
    said, error = outcome(lambda: rig.decoder.fetch(made.offer.ticket, Target(*made.target.handed, MODEL)))
    if said == "right":
        raise Wrong("a ticket of the prefiller's earlier life was honoured")
    judge_failure(error)
    return [rig.start(rig.begin(rng, "after"))]


def _restart_decoder(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    rig.decoder.close()
    rig.decoder = rig.new_decoder()
    return [rig.start(rig.begin(rng, "after"))]


def _fill_decoder(rig: Rig, made: Handoff, rng: random.Random) -> list[Handoff]:
    pool = rig.decoder._pool
    taken = []
    while (extent := pool.try_take(ALIGNMENT)) is not None:
        taken.append(extent)
    time.sleep(rng.choice([0.02, 0.4]))
    for extent in taken:
        pool.give_back(extent)
    return []


def _scribble(made: Handoff) -> None:
    """The engine gives the pages to another request."""
    other = paged_cache(16, 8, 77)
    for index, layer in made.source.cache.layers.items():
        layer.key.copy_(other.layers[index].key)
        layer.value.copy_(other.layers[index].value)


def _preempt(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """The engine gives the request up while one of its chunks is being packed, hands its pages to another, and offers it again later."""
    made = rig.begin(rng)
    met = []

    def before(what: str, number: int) -> None:
        if what == "pack" and number == CHUNK_STEPS[step]:
            made.offer.cancel()
            _scribble(made)
            met.append(number)

    rig.device.reset(before)
    ended = rig.end(rig.start(made))
    rig.device.reset()
    again = rig.begin(rng)
    return [ended, rig.end(rig.start(again))], bool(met)


def _reassign(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """The pages go to another request as soon as `advance` has returned: what was packed does not change."""
    made = rig.begin(rng, mode=Mode.PARK)
    judge_failure(outcome(lambda: made.offer.advance(TOKENS))[1])
    acting = []
    rig.at[step] = lambda: acting.append(_scribble(made))
    ended = rig.end(rig.start(made))
    return [ended], bool(acting)


def _device_fails(what: str) -> Run:
    def run(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
        met = []

        def before(called: str, number: int) -> None:
            if called == what and number == CHUNK_STEPS[step]:
                met.append(number)
                raise RuntimeError("the emulated driver fails")

        rig.device.reset(before)
        ended = _whole(rig, rng)
        return ended, bool(met)

    return run


def _prefiller_full(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    pool, taken = rig.prefiller._pool, []
    while (extent := pool.try_take(ALIGNMENT)) is not None:
        taken.append(extent)
    ended = []
    try:
        if step == "offer (park)":
            said, error = outcome(lambda: rig.begin(rng, mode=Mode.PARK))
            judge_failure(error)
            ended.append(Ended("", said))
        else:
            made = rig.begin(rng, mode=Mode.STREAM)
            ended.append(rig.end(rig.start(made)))
    finally:
        for extent in taken:
            pool.give_back(extent)
    return [*ended, *_whole(rig, rng)], True


def _rank_fails(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """Two ranks of a decoder take one head each; one of them gives up at the step, and the other must not wait for it."""
    made = rig.begin(rng)
    part = [made.target.cache.part(range(3), head, 1) for head in (0, 1)]
    other, acting = rig.new_decoder(), []
    made.packing = rig.threads.submit(outcome, lambda: made.offer.advance(TOKENS))
    second = other.start(made.offer.ticket, Target(part[1], made.target.table, MODEL, reader=1, readers=2))

    def act() -> None:
        second.cancel()

    rig.at[step] = lambda: acting.append(rig.threads.submit(act))
    made.fetch = rig.decoder.start(made.offer.ticket, Target(part[0], made.target.table, MODEL, reader=0, readers=2))
    made.started.set()
    try:
        said, error = outcome(lambda: second.result(PATIENCE))
        judge_failure(error)
        first, error = outcome(lambda: made.fetch.result(PATIENCE))
        judge_failure(error)
        told, error = outcome(lambda: made.offer.wait(PATIENCE))
        judge_failure(error)
        made.packing.result(PATIENCE)
        if not second.done() or not made.fetch.done() or not made.offer._lease.finished.is_set():
            raise Wrong("an end hangs")
        if told == "right" and not {said, first} <= {"right", "cancelled"}:  # a rank may be cancelled after its commit
            raise Wrong("the prefiller counts a hand-off as committed that failed on one rank")
        expected, found = made.expected, made.target.bytes()
        for head, ending in ((0, first), (1, said)):
            same = found[..., head, :] == expected[..., head, :]
            if ending == "right" and not same.all():
                raise Wrong("wrong content was committed by a rank")
            if not (same | (found[..., head, :] == POISON)).all():
                raise Wrong("a rank's pages hold bytes of something else")
    finally:
        other.close()
    return [Ended(f"{first}+{said}", told)], bool(acting)


_jump = threading.Lock()


def _clock_jumps(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """The wall clock jumps by up to ten years while the hand-off runs: nothing may ask it (a real jump: test_clock.py)."""
    real, offset = time.time, rng.uniform(-3e8, 3e8)
    met = []

    def jump() -> None:
        met.append(1)
        time.time = lambda: real() + offset  # type: ignore[assignment]

    with _jump:
        try:
            rig.at[step] = jump
            ended = _whole(rig, rng)
        finally:
            time.time = real  # type: ignore[assignment]
    return ended, bool(met)


class FullDisk(io.BytesIO):
    """A file on a disk that has room for `room` bytes (a real one: test_disk.py)."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        view = memoryview(data)[: max(self.room - self.tell(), 0)]
        super().write(view)
        if len(view) < len(memoryview(data)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(view)


def _disk_full(rig: Rig, step: str, rng: random.Random) -> tuple[list[Ended], bool]:
    """A .kvb file that could not be written whole is refused when it is read."""
    pages, described, key = source_pages(rng.randrange(2, 1 << 30)), manifest("r", TOKENS, chunk_tokens=CHUNK_TOKENS), new_key()
    layout = PayloadMap(described)
    data = np.zeros(layout.payload_bytes, np.uint8)
    for index in range(layout.chunk_count):
        chunk = layout.chunk(index)
        share = chunk_share(described, chunk, pages.cache)
        keys = TagKeys(key, described.lease, described.generation)
        rig.device.pack(*pages.handed, share.shares, keys, data[chunk.offset : chunk.offset + chunk.nbytes])
    whole = io.BytesIO()
    write_container(whole, described, key, data.data)
    size = len(whole.getvalue())
    room = {"prelude": rng.randrange(0, 64), "manifest": rng.randrange(64, 256), "payload": rng.randrange(size // 2, size)}[step]
    disk = FullDisk(room)
    try:
        write_container(disk, described, key, data.data)
        raise Wrong("a full disk was not noticed")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
    left = disk.getvalue()
    try:
        verify_contents(*read_stream(io.BytesIO(left), len(left)))
        raise Wrong("a file that was cut short was accepted")
    except WireError as error:
        return [Ended(error.clause, "ENOSPC")], True


FAULTS: tuple[Fault, ...] = (
    *(Fault(f"data: {kind}", meaning, tuple(CHUNK_STEPS), _data(kind)) for kind, meaning in DATA_FAULTS.items()),
    *(Fault(kind, meaning, MESSAGES, _message(kind)) for kind, meaning in MESSAGE_FAULTS.items()),
    *(Fault(f"link: {kind}", meaning, CONNECT_STEPS + STEPS, _link(kind)) for kind, meaning in LINK_FAULTS.items()),
    Fault("cancel, decoder", "the decoder's engine gives the request up, once or several times", STEPS, _at(_cancel_decoder)),
    Fault("cancel, prefiller", "the prefiller's engine gives the request up", STEPS, _at(_cancel_prefiller)),
    Fault("preemption", "while a chunk is being packed; its pages go to another request", tuple(CHUNK_STEPS), _preempt),
    Fault("pages reassigned", "as soon as `advance` has returned", tuple(f"decoder {step}" for step in DECODER_STEPS), _reassign),
    Fault("offered anew", "the request is offered and fetched again", STEPS, _at(_offer_anew)),
    Fault("lease expiry", "the lease runs out in mid-transfer", BEFORE_THE_END, _expiry),
    Fault("prefiller restart", "under the same name and port", STEPS, _at(_restart_prefiller)),
    Fault("decoder restart", "under the same name", STEPS, _at(_restart_decoder)),
    Fault("staging full, decoder", "for 0.02 or 0.4 s", STEPS, _at(_fill_decoder)),
    Fault("staging full, prefiller", "at the offer, or at a chunk", ("offer (park)", "chunk (stream)"), _prefiller_full),
    Fault("one rank fails", "of a decoder's two", STEPS, _rank_fails),
    Fault("device fails, pack", "an exception of the device", tuple(CHUNK_STEPS), _device_fails("pack")),
    Fault("device fails, land", "an exception of the device", tuple(CHUNK_STEPS), _device_fails("land")),
    Fault("wall clock jumps", "by up to ten years, either way", STEPS, _clock_jumps),
    Fault("disk full", "while a .kvb file is written", ("prelude", "manifest", "payload"), _disk_full),
)
CELLS = [(fault, step) for fault in FAULTS for step in fault.steps]


def run_one(rig: Rig, number: int, seed: int) -> tuple[str, str, list[Ended], bool]:
    """Run `number` of this seed: (fault, step, what the ends said, whether the fault was met). Raises Wrong."""
    fault, step = CELLS[number % len(CELLS)]
    rng = random.Random(f"{seed}/{number}")
    before = rig.counts()
    ends = rig.decoder, rig.prefiller
    rig.met = False
    try:
        ended, met = fault.run(rig, step, rng)
    finally:
        rig.settle()
    judge_counters(rig, before, ends)
    return fault.name, step, ended, met


def judge_counters(rig: Rig, before: tuple[dict[str, int], dict[str, int]], ends: tuple[Any, Any]) -> None:
    """Every hand-off was counted once, as committed or as failed by its clause. Raises Wrong."""
    after = rig.counts()
    for old, new, begun, end, now in zip(before, after, ("fetches", "offered"), ends, (rig.decoder, rig.prefiller), strict=True):
        if end is not now:
            continue
        grown = {name: new[name] - old.get(name, 0) for name in new}
        closed = sum(count for name, count in grown.items() if name == "committed" or name.startswith("failed{"))
        if grown.get(begun, 0) != closed:
            raise Wrong(f"{grown.get(begun, 0)} hand-offs began and {closed} were counted as ended: {grown}")
