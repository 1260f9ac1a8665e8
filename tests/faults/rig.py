"""Both ends of the hand-off in one process, with everything between them faulty on demand, and the judge of what came of a hand-off."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.cpu.device import CpuReferenceDevice
from bridge.errors import KVBridgeError
from bridge.handoff import Bounds, Decoder, Fetch, Mode, Offer, PeerConfig, Prefiller, Target, create_identity
from bridge.handoff.errors import CannotListen, LeaseExpired
from bridge.handoff.loop import LoopThread
from bridge.pages import BlockTable, PagedCache
from tests.faults.faulty_agent import FaultyAgent
from tests.faults.faulty_channel import BY_PORT, Tamper
from tests.faults.proxy import Proxy
from tests.handoff.local_agent import LocalAgent
from tests.handoff.pair import MODEL, block_table, manifest, paged_cache, tokens_of
from tests.ports import kept_port

TOKENS, CHUNK_TOKENS, CHUNKS = 96, 32, 3
BOUNDS = Bounds(connect=0.5, claim=0.4, chunk=0.4, transfer=0.25, staging=0.25, lease=0.8, heartbeat=0.1, silence=0.5)
UNHURRIED = Bounds(connect=30, claim=30, chunk=30, transfer=30, staging=30, lease=120, heartbeat=0.1, silence=30)
"""Where nothing is waited for in vain: a busy machine must not end a hand-off before the fault does."""
PATIENCE = 60.0
"""Seconds after which an end that has not ended counts as hanging: many times the sum of all bounds."""
POISON = np.int16(0xCDCD - 0x10000)
"""What the decoder's pages are full of before a hand-off, as 16-bit words."""


class Wrong(Exception):
    """What must never be: wrong content, an untyped or uncounted failure, an end that hangs, something left behind."""


@dataclass
class Pages:
    cache: PagedCache
    table: BlockTable

    @property
    def handed(self) -> tuple[PagedCache, BlockTable]:
        return self.cache, self.table

    def bytes(self) -> np.ndarray:
        return tokens_of(self.cache, self.table, TOKENS)

    def everything(self) -> np.ndarray:
        sides = [side for layer in self.cache.layers.values() for side in (layer.key, layer.value)]
        return np.stack([side.view(torch.int16).numpy() for side in sides])


def source_pages(seed: int) -> Pages:
    return Pages(paged_cache(16, 8, seed), block_table(16, 8, seed % 1000))


def target_pages(seed: int) -> Pages:
    cache = paged_cache(64, 3, None)
    for layer in cache.layers.values():
        for side in (layer.key, layer.value):
            side.view(torch.int16).fill_(int(POISON))
    return Pages(cache, block_table(64, 3, seed % 1000))


class FaultyDevice(CpuReferenceDevice):
    """Calls `before(what, number)` before each pack and land, so that a test can fail or slow it."""

    def __init__(self) -> None:
        self.before: Callable[[str, int], None] = lambda what, number: None
        self.calls = {"pack": 0, "land": 0}

    def reset(self, before: Callable[[str, int], None] = lambda what, number: None) -> None:
        self.before, self.calls = before, {"pack": 0, "land": 0}

    def _count(self, what: str) -> None:
        number = self.calls[what]
        self.calls[what] += 1
        self.before(what, number)

    def pack(self, *arguments: Any, **more: Any) -> None:
        self._count("pack")
        super().pack(*arguments, **more)

    def land(self, *arguments: Any, **more: Any) -> None:
        self._count("land")
        super().land(*arguments, **more)


@dataclass
class Ended:
    """What one end said: "right" for the right bytes, or the clause of its typed failure."""

    decoder: str = ""
    prefiller: str = ""

    def __str__(self) -> str:
        return f"{self.decoder}/{self.prefiller}"


@dataclass
class Handoff:
    """One hand-off that runs on the rig."""

    source: Pages
    target: Pages
    mode: Mode
    expected: np.ndarray
    """What the source's pages hold when they are offered; a test may reassign them later."""
    offer: Offer | None = None
    fetch: Fetch | None = None
    started: threading.Event = field(default_factory=threading.Event)
    packing: Any = None


class Rig:
    """A pair of ends that lives through many hand-offs, as in production."""

    def __init__(self, folder: Path, bounds: Bounds = BOUNDS) -> None:
        self.bounds, self.ports = bounds, contextlib.ExitStack()
        self.prefill_identity, self.decode_identity = create_identity("prefill-0", folder), create_identity("decode-0", folder)
        self.agent = FaultyAgent(LocalAgent())
        self.device = FaultyDevice()
        self.tamper = Tamper()
        self.network = LoopThread("proxy")
        self.threads = ThreadPoolExecutor(6, thread_name_prefix="rig")
        self.at: dict[str, Callable[[], None]] = {}
        self.met = False
        self.port = self.ports.enter_context(kept_port())
        self.prefiller = self.new_prefiller()
        self.proxy = Proxy(self.network, self.prefiller.port)
        for port in (self.port, self.proxy.port):
            BY_PORT[port] = self.tamper
        self.decoder = self.new_decoder()
        self.park_bystander()
        self.held = self.prefiller.staging()[0]
        """Bytes of staging memory that the bystander's payload keeps."""

    def park_bystander(self) -> None:
        """Another request's payload lies in the prefiller's staging memory all the time; its bytes must never be taken for another's."""
        described = manifest("bystander", TOKENS, chunk_tokens=CHUNK_TOKENS)
        while True:
            self.bystander = self.prefiller.offer(described, *source_pages(1).handed)
            with contextlib.suppress(LeaseExpired):  # its lease is as short as all of them, and the machine may be busy
                self.bystander.advance(TOKENS)
                with self.prefiller._leases.lock:
                    self.keep_bystander()
                    if self.bystander._lease.live:
                        break
        self.elsewhere = self.bystander._lease.slots[1].offset

    def keep_bystander(self) -> None:
        self.bystander._lease.deadline = time.monotonic() + 3600

    def _step(self, step: str, details: dict[str, Any]) -> None:
        if details.get("request_id") == "bystander":
            return
        action = self.at.pop(step, None)
        if action is not None:
            self.met = True
            action()

    def new_prefiller(self) -> Prefiller:
        """Always at the same port. The bounds of hand-offs are too short for a busy machine to open it."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._new_prefiller()
            except CannotListen:
                if time.monotonic() > deadline:
                    raise

    def _new_prefiller(self) -> Prefiller:
        return Prefiller(
            self.prefill_identity,
            {"decode-0": PeerConfig(self.decode_identity.certificate)},
            self.device,
            self.agent,
            staging_bytes=1 << 20,
            port=self.port,
            bounds=self.bounds,
            stream_depth=1,
            observe=lambda step, details: self._step(f"prefiller {step}", details),
        )

    def new_decoder(self) -> Decoder:
        return Decoder(
            self.decode_identity,
            {"prefill-0": PeerConfig(self.prefill_identity.certificate, "127.0.0.1", self.proxy.port)},
            self.device,
            self.agent,
            staging_bytes=1 << 20,
            bounds=self.bounds,
            observe=lambda step, details: self._step(f"decoder {step}", details),
        )

    def begin(self, rng: random.Random, request_id: str = "r", mode: Mode | None = None) -> Handoff:
        """Offers a request of random content; `start` fetches it."""
        seed = rng.randrange(2, 1 << 30)
        source = source_pages(seed)
        made = Handoff(source, target_pages(seed), mode or rng.choice(list(Mode)), source.bytes())
        self.keep_bystander()
        described = manifest(request_id, TOKENS, chunk_tokens=CHUNK_TOKENS)
        made.offer = self.prefiller.offer(described, *made.source.handed, mode=made.mode)
        return made

    def start(self, made: Handoff, **more: Any) -> Handoff:
        assert made.offer is not None
        made.packing = self.threads.submit(outcome, lambda: made.offer.advance(TOKENS))
        made.fetch = self.decoder.start(made.offer.ticket, Target(*made.target.handed, MODEL, **more))
        made.started.set()
        return made

    def end(self, made: Handoff) -> Ended:
        """Waits for both ends and judges them. Raises Wrong."""
        assert made.offer is not None
        assert made.fetch is not None
        said, error = outcome(lambda: made.fetch.result(PATIENCE))
        if not made.fetch.done():
            raise Wrong("the decoder hangs")
        judge_content(made, committed=said == "right")
        judge_failure(error)
        _, error = made.packing.result(PATIENCE)
        judge_failure(error)
        told, error = outcome(lambda: made.offer.wait(PATIENCE))
        if not made.offer._lease.finished.is_set():
            raise Wrong("the prefiller hangs")
        judge_failure(error)
        return Ended(said, told)

    def settle(self) -> None:
        """Undoes every fault and demands that nothing is left of the hand-off. Raises Wrong."""
        self.agent.heal()
        self.proxy.heal()
        self.agent.again.clear()
        self.at.clear()
        self.device.reset()

        def free() -> bool:
            self.decoder.quarantined()
            return self.decoder.staging()[0] == 0 and self.prefiller.staging()[0] == self.held and self.prefiller.live_leases() == 1

        deadline = time.monotonic() + PATIENCE
        while not free():
            if time.monotonic() > deadline:
                raise Wrong(
                    f"left behind: {self.decoder.staging()[0]} bytes at the decoder, {self.prefiller.staging()[0] - self.held} at the "
                    f"prefiller, {self.prefiller.live_leases() - 1} leases"
                )
            time.sleep(0.002)
        self.agent.arm(None)
        self.tamper.arm(None)

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        return self.decoder.counters.snapshot(), self.prefiller.counters.snapshot()

    def close(self) -> None:
        self.decoder.close()
        self.prefiller.close()
        self.proxy.close()
        self.network.close()
        self.threads.shutdown()
        self.ports.close()


def outcome(work: Callable[[], Any]) -> tuple[str, BaseException | None]:
    try:
        work()
    except KVBridgeError as error:
        return error.clause, error
    except BaseException as error:
        return type(error).__name__, error
    return "right", None


def judge_content(made: Handoff, committed: bool) -> None:
    """Committed: the pages hold exactly the source's bytes. Failed: each byte is the source's or still the poison, so of no one else."""
    expected, found = made.expected, made.target.bytes()
    if committed and not np.array_equal(expected, found):
        raise Wrong("wrong content was committed")
    if not ((found == expected) | (found == POISON)).all():
        raise Wrong("the pages hold bytes of something else")
    everything = made.target.everything()
    if (everything != POISON).sum() > (found != POISON).sum():
        raise Wrong("pages outside the block table were written")


def judge_failure(error: BaseException | None) -> None:
    """A failure has a type of ours, a clause, and says what to do."""
    if error is None:
        return
    if not isinstance(error, KVBridgeError):
        raise Wrong(f"an untyped failure: {type(error).__name__}: {error}")
    if error.clause in ("error", "handoff", "") or not error.detail:
        raise Wrong(f"a failure without a clause or detail: {error!r}")
