"""Many peers: P prefillers and D decoders, each decoder fetching small payloads from all prefillers at once, as fast as it goes.

    python benchmarks/peers.py [--prefillers 8] [--decoders 8] [--count 20000] [--window 256] [--agent nixl] [--profile] [--json FILE]

The prefillers live in one process, the decoders in another, so that two cores are used. A payload is one chunk of 16 tokens of one layer:
what is measured is the control plane, with a read, a verification and a landing each. Every landed page is compared with what its
prefiller packed. Prints hand-offs a second, processor time of each side for one, latencies, how evenly the pairs were served, and what
grew: memory, descriptors, threads, registrations, each when a tenth had passed and at the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TOKENS, HEADS, HEAD_DIM = 16, 1, 64
MODEL = bytes(32)
STAGING = 1 << 22


@dataclass(frozen=True)
class Plan:
    """prefillers, decoders: of each. count: hand-offs in all. window: fetches that one decoder has under way at a time."""

    prefillers: int = 8
    decoders: int = 8
    count: int = 20_000
    window: int = 256
    agent: str = "nixl"
    device: str = "cpu-reference"
    folder: str = ""
    profile: bool = False
    samples: int = 100
    latencies: bool = True
    """Whether each hand-off's time is kept: the list grows with the count."""


@dataclass
class Sample:
    """What a process holds, after so many hand-offs."""

    done: int
    seconds: float
    cpu: float
    resident_kib: int
    descriptors: int
    threads: int
    registered: int
    staging: int


@dataclass
class Side:
    """What one process reports."""

    samples: list[Sample] = field(default_factory=list)
    counters: list[dict[str, int]] = field(default_factory=list)
    pairs: dict[str, int] = field(default_factory=dict)
    halfway: dict[str, int] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    waits: int = 0
    wrong: int = 0
    most_at_once: int = 0
    profile: list[tuple[str, int]] = field(default_factory=list)


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def _sample(done: int, start: float, ends: list[Any], agents: list[Any]) -> Sample:
    return Sample(
        done,
        time.perf_counter() - start,
        time.process_time(),
        _resident_kib(),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        sum(agent.registered_bytes() for agent in set(agents)),
        sum(end.staging()[0] for end in ends),
    )


@contextlib.contextmanager
def _profiled(report: Side, wanted: bool) -> Iterator[None]:
    """Samples what every thread of this process runs, 200 times a second: (function, how often), the threads that wait left out."""
    counts: collections.Counter[str] = collections.Counter()
    stop = threading.Event()

    def look() -> None:
        own = threading.get_ident()
        while not stop.wait(0.005):
            for ident, frame in sys._current_frames().items():
                code = frame.f_code
                if ident != own and code.co_name not in ("wait", "select", "_worker", "poll", "acquire"):
                    counts[f"{Path(code.co_filename).parent.name}/{Path(code.co_filename).name}:{code.co_name}"] += 1

    if not wanted:
        yield
        return
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        report.profile = counts.most_common(40)


def _agent(kind: str, name: str, serves: bool) -> Any:
    if kind == "nixl":
        from bridge.transfer.nixl import NixlAgent

        return NixlAgent(name, serves=serves)
    raise SystemExit(f"no agent named {kind}")


def _cache(pages: int, block: int, seed: int | None) -> Any:
    import torch

    from bridge.pages import LayerPages, PagedCache

    shape = (pages, block, HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(seed or 0)
    sides = [torch.full(shape, float("nan")) if seed is None else torch.randn(shape, generator=generator) for _ in (0, 1)]
    return PagedCache({0: LayerPages.nhd(*(side.to(torch.bfloat16) for side in sides))})


def _bounds() -> Any:
    from bridge.handoff import Bounds

    # The machine is the bottleneck, on purpose: nothing may fail because it waits its turn.
    return Bounds(connect=60, claim=120, chunk=120, transfer=120, staging=120, lease=300, heartbeat=5, silence=60)


def _identities(plan: Plan, role: str) -> Any:
    from bridge.handoff import Identity, PeerConfig

    folder = Path(plan.folder)
    own = range(plan.prefillers if role == "prefiller" else plan.decoders)
    identities = [Identity(f"{role}-{i}", folder / f"{role}-{i}.crt", folder / f"{role}-{i}.key") for i in own]
    other, count = ("decoder", plan.decoders) if role == "prefiller" else ("prefiller", plan.prefillers)
    return identities, {f"{other}-{i}": PeerConfig(folder / f"{other}-{i}.crt") for i in range(count)}


def prefill(plan: Plan, pipe: Any) -> None:
    """The process of the prefillers: each offers its share as fast as its staging memory takes them."""
    import torch

    from bridge.codecs import declared
    from bridge.devices import open_device
    from bridge.handoff import Prefiller
    from bridge.handoff.errors import StagingFull
    from bridge.pages import BlockTable
    from bridge.wire import ContentKind, Element, Group, Layer, Manifest, token_digest

    torch.set_num_threads(1)
    device, report = open_device(plan.device), Side()
    identities, peers = _identities(plan, "prefiller")
    # One agent for all of the process, as an engine has one: each has threads, and its own connection to each peer.
    agents = [_agent(plan.agent, "prefillers", True)] * plan.prefillers
    ends = [
        Prefiller(identity, peers, device, agent, staging_bytes=STAGING, bounds=_bounds())
        for identity, agent in zip(identities, agents, strict=True)
    ]
    pipe.send([end.port for end in ends])
    codec = declared("raw").for_layer(HEAD_DIM, Element.BF16)
    content = ((ContentKind.TOKENS, token_digest(list(range(TOKENS)))),)
    sending, start = threading.Lock(), time.perf_counter()

    def offer_all(index: int) -> None:
        cache, table, end = _cache(2, TOKENS, index + 1), BlockTable([1], TOKENS), ends[index]
        for number in range(index, plan.count, plan.prefillers):
            name = f"p{index}-{number}"
            manifest = Manifest(MODEL, content, name, 0, 0, TOKENS, (Group(HEADS, HEAD_DIM, 0, TOKENS),), (codec,), (Layer(0, 0, 0),))
            while True:
                try:
                    offer = end.offer(manifest, cache, table)
                    break
                except StagingFull:
                    report.waits += 1
                    time.sleep(0.005)
            offer.advance(TOKENS)
            with sending:
                pipe.send(((index + number // plan.prefillers) % plan.decoders, index, offer.ticket.to_dict()))

    with _profiled(report, plan.profile):
        threads = [threading.Thread(target=offer_all, args=(index,)) for index in range(plan.prefillers)]
        for thread in threads:
            thread.start()
        every = max(plan.count // plan.samples, 1)
        while any(thread.is_alive() for thread in threads) or any(end.live_leases() for end in ends):
            done = sum(end.counters.snapshot().get("committed", 0) for end in ends)
            if done >= every * len(report.samples):
                report.samples.append(_sample(done, start, ends, agents))
            time.sleep(0.02)
    with sending:
        pipe.send(None)
    report.samples.append(_sample(plan.count, start, ends, agents))
    report.counters = [end.counters.snapshot() for end in ends]
    pipe.send(asdict(report))
    pipe.recv()
    for end in ends:
        end.close()
    agents[0].close()


def decode(plan: Plan, pipe: Any, tickets: Any) -> None:
    """The process of the decoders: each keeps `window` fetches under way while there are tickets."""
    import torch

    from bridge.devices import open_device
    from bridge.handoff import Decoder, PeerConfig, Target, Ticket
    from bridge.pages import BlockTable

    torch.set_num_threads(1)
    device, report = open_device(plan.device), Side()
    identities, peers = _identities(plan, "decoder")
    ports = pipe.recv()
    peers = {name: PeerConfig(peer.certificate, "127.0.0.1", port) for (name, peer), port in zip(peers.items(), ports, strict=True)}
    agents = [_agent(plan.agent, "decoders", False)] * plan.decoders
    ends = [
        Decoder(identity, peers, device, agent, staging_bytes=STAGING, bounds=_bounds())
        for identity, agent in zip(identities, agents, strict=True)
    ]
    sources = [_cache(2, TOKENS, index + 1).layers[0] for index in range(plan.prefillers)]
    caches = [_cache(plan.window, TOKENS, None) for _ in ends]
    free = [collections.deque(range(plan.window)) for _ in ends]
    room = [threading.Semaphore(plan.window) for _ in ends]
    lock, start, state = threading.Lock(), time.perf_counter(), {"done": 0, "running": 0}
    pairs: collections.Counter[str] = collections.Counter()
    every = max(plan.count // plan.samples, 1)

    def ended(index: int, source: int, page: int, fetch: Any, begun: float) -> Callable[[], None]:
        def note() -> None:
            landed, packed = caches[index].layers[0], sources[source]
            right = fetch.failure() is not None or all(
                torch.equal(getattr(landed, side)[page].view(torch.int16), getattr(packed, side)[1].view(torch.int16))
                for side in ("key", "value")
            )
            for side in (landed.key, landed.value):
                side[page].fill_(float("nan"))
            with lock:
                state["running"] -= 1
                state["done"] += 1
                report.wrong += not right
                pairs[f"{source}-{index}"] += 1
                if plan.latencies:
                    report.latencies.append(time.perf_counter() - begun)
                if state["done"] == plan.count // 2:
                    report.halfway = dict(pairs)
            free[index].append(page)
            room[index].release()

        return note

    with _profiled(report, plan.profile):
        while (item := tickets.recv()) is not None:
            index, source, ticket = item
            room[index].acquire()
            page = free[index].popleft()
            fetch = ends[index].start(Ticket.from_dict(ticket), Target(caches[index], BlockTable([page], TOKENS), MODEL))
            with lock:
                state["running"] += 1
                report.most_at_once = max(report.most_at_once, state["running"])
            fetch.when_done(ended(index, source, page, fetch, time.perf_counter()))
            if state["done"] >= every * len(report.samples):
                report.samples.append(_sample(state["done"], start, ends, agents))
        while state["running"]:
            time.sleep(0.01)
    report.samples.append(_sample(state["done"], start, ends, agents))
    report.counters, report.pairs = [end.counters.snapshot() for end in ends], dict(pairs)
    pipe.send(asdict(report))
    pipe.recv()
    for end in ends:
        end.close()
    agents[0].close()


def run(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the prefillers' process reports, what the decoders' process reports)."""
    from bridge.handoff import create_identity

    with tempfile.TemporaryDirectory(prefix="kvbridge-peers-") as folder:
        for role, count in (("prefiller", plan.prefillers), ("decoder", plan.decoders)):
            for index in range(count):
                create_identity(f"{role}-{index}", Path(folder))
        plan = Plan(**{**asdict(plan), "folder": folder})
        context = multiprocessing.get_context("spawn")
        left, prefill_pipe = context.Pipe()
        right, decode_pipe = context.Pipe()
        ticket_out, ticket_in = context.Pipe(duplex=False)
        prefilling = context.Process(target=_prefill, args=(plan, prefill_pipe, ticket_in))
        decoding = context.Process(target=decode, args=(plan, decode_pipe, ticket_out))
        prefilling.start()
        decoding.start()
        right.send(left.recv())
        decoded, prefilled = right.recv(), left.recv()
        left.send(None)
        right.send(None)
        prefilling.join(60)
        decoding.join(60)
    return prefilled, decoded


class _Pipes:
    """Tickets go to the decoders, everything else to the parent."""

    def __init__(self, parent: Any, tickets: Any) -> None:
        self._parent, self._tickets = parent, tickets
        self.recv = parent.recv

    def send(self, item: Any) -> None:
        (self._tickets if item is None or isinstance(item, tuple) else self._parent).send(item)


def _prefill(plan: Plan, pipe: Any, tickets: Any) -> None:
    prefill(plan, _Pipes(pipe, tickets))


def tenths(side: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of what a process holds: its mean over the first and over the last tenth of the hand-offs, the very beginning left out."""
    samples = side["samples"]
    total = samples[-1]["done"]
    first = [sample for sample in samples if total * 0.02 <= sample["done"] <= total / 10] or samples[:1]
    last = [sample for sample in samples if sample["done"] >= total * 0.9] or samples[-1:]
    names = ("resident_kib", "descriptors", "threads", "registered")
    return {name: (statistics.fmean(s[name] for s in first), statistics.fmean(s[name] for s in last)) for name in names}


def _failures(side: dict[str, Any]) -> dict[str, int]:
    """By clause, over all ends."""
    found: collections.Counter[str] = collections.Counter()
    for counters in side["counters"]:
        found.update({name: count for name, count in counters.items() if name.startswith("failed")})
    return dict(found)


def summary(plan: Plan, prefilled: dict[str, Any], decoded: dict[str, Any]) -> dict[str, Any]:
    samples = [sample for sample in decoded["samples"] if sample["done"] > plan.count * 0.1]
    steady = (samples[-1]["done"] - samples[0]["done"]) / (samples[-1]["seconds"] - samples[0]["seconds"])
    latencies = sorted(decoded["latencies"]) or [0.0]
    halfway = list(decoded["halfway"].values()) or [0]

    def cpu(side: dict[str, Any]) -> float:
        part = [sample for sample in side["samples"] if sample["done"] > plan.count * 0.1]
        return (part[-1]["cpu"] - part[0]["cpu"]) / max(part[-1]["done"] - part[0]["done"], 1) * 1e3

    return {
        "handoffs_per_second": steady,
        "cpu_ms": {"prefiller": cpu(prefilled), "decoder": cpu(decoded)},
        "latency_s": {name: latencies[int(len(latencies) * share)] for name, share in (("median", 0.5), ("p99", 0.99), ("max", 0.9999999))},
        "pairs_halfway": {"pairs": len(halfway), "least": min(halfway), "most": max(halfway)},
        "at_once": decoded["most_at_once"],
        "offers_that_waited_for_staging": prefilled["waits"],
        "wrong": decoded["wrong"],
        "committed": sum(counters.get("committed", 0) for counters in prefilled["counters"]),
        "failed": sum(_failures(decoded).values()),
        "failures": {"prefillers": _failures(prefilled), "decoders": _failures(decoded)},
        "prefillers_hold": tenths(prefilled),
        "decoders_hold": tenths(decoded),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("prefillers", 8), ("decoders", 8), ("count", 20_000), ("window", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--agent", default="nixl")
    parser.add_argument("--device", default="cpu-reference")
    parser.add_argument("--profile", action="store_true", help="also print where both processes were, by samples")
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    where = options.pop("json")
    plan = Plan(**options)
    prefilled, decoded = run(plan)
    found = summary(plan, prefilled, decoded)
    print(f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(json.dumps(found, indent=1))
    for side, report in (("prefillers", prefilled), ("decoders", decoded)):
        for function, count in report["profile"][:25]:
            print(f"{side:12}{count:7}  {function}")
    if where:
        where.write_text(json.dumps({"plan": options, "summary": found}, indent=1))
    return 1 if found["wrong"] or found["failed"] or found["committed"] != plan.count else 0


if __name__ == "__main__":
    sys.exit(main())
