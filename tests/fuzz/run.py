"""The bounded run: `python -m tests.fuzz.run --mutations 1000000 --seed 1 --json hits.json`.

Prints how often each clause refused, and how often a mutant was accepted (rightly). Exit status 1 where a reader did what it must not, or
where a clause was never hit. `--only NUMBER` makes and judges one mutant again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

from bridge.errors import all_error_types
from bridge.wire import errors
from tests.fuzz.judge import ACCEPTED, Fault, Judge, find_second_judge, resident_kib
from tests.fuzz.mutate import Mutator

ROOM = 512 << 20
"""Bytes of address space that a worker may take beyond what it has at its start."""
MAX_GROWTH_KIB = 64 << 10
MEASURED_EVERY = 997
MAX_PEAK = 1 << 21
"""Bytes that Python may hold at a time while one mutant is judged; measured for one in MEASURED_EVERY."""
MAX_FAULTS = 20


def clauses() -> list[str]:
    return [clause for clause, error in all_error_types(errors.WireError).items() if error is not errors.WireError]


def _limit_address_space() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)


def work(seed: int, first: int, end: int) -> dict[str, Any]:
    """Judges the mutants of these numbers, in this process, which must be a fresh one where memory is to be measured."""
    mutator = Mutator(seed)
    judge = Judge(mutator.originals, find_second_judge())
    faults, peak = [], 0
    resident = 0
    for number in range(first, end):
        mutant = mutator.make(number)
        measured = number % MEASURED_EVERY == 0
        if measured:
            tracemalloc.start()
        try:
            judge.judge(mutant)
            if measured:
                peak = max(peak, tracemalloc.get_traced_memory()[1])
                if peak > MAX_PEAK:
                    raise Fault(f"{peak} bytes at the peak")
        except Fault as fault:
            faults.append({"number": number, "how": mutant.how, "fault": str(fault)[:2000]})
            if len(faults) >= MAX_FAULTS:
                break
        finally:
            if measured:
                tracemalloc.stop()
        if number - first == 1000:
            resident = resident_kib()
    return {
        "hits": dict(judge.hits),
        "hits_repaired": dict(judge.hits_repaired),
        "accepted_unchanged": judge.accepted_unchanged,
        "decoded": judge.decoded,
        "slowest": judge.slowest,
        "slowest_how": judge.slowest_how,
        "peak_bytes": peak,
        "grown_kib": resident_kib() - resident if resident else 0,
        "second_judge": judge.second is not None,
        "faults": faults,
    }


def _worker(arguments: tuple[int, int, int]) -> dict[str, Any]:
    return work(*arguments)


def run(mutations: int, seed: int, processes: int = 2) -> dict[str, Any]:
    """The whole run over some processes; the sum of what they found."""
    start, step = time.perf_counter(), (mutations + processes - 1) // processes
    parts = [(seed, i, min(i + step, mutations)) for i in range(0, mutations, step)]
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_limit_address_space) as pool:
        found = pool.map(_worker, parts, chunksize=1)
    hits: Counter[str] = Counter({clause: 0 for clause in [*clauses(), ACCEPTED]})
    repaired: Counter[str] = Counter()
    for part in found:
        hits.update(part["hits"])
        repaired.update(part["hits_repaired"])
    seconds = time.perf_counter() - start
    slowest = max(found, key=lambda part: part["slowest"])
    grown = max(part["grown_kib"] for part in found)
    faults = [fault for part in found for fault in part["faults"]]
    if grown > MAX_GROWTH_KIB:
        faults.append({"number": -1, "how": "", "fault": f"a worker grew by {grown} KiB"})
    return {
        "mutations": sum(hits.values()),
        "seed": seed,
        "seconds": round(seconds, 1),
        "per_second": round(sum(hits.values()) / seconds),
        "hits": dict(hits),
        "hits_repaired": dict(repaired),
        "accepted_unchanged": sum(part["accepted_unchanged"] for part in found),
        "decoded": sum(part["decoded"] for part in found),
        "slowest_ms": round(1000 * slowest["slowest"], 2),
        "slowest_how": slowest["slowest_how"],
        "peak_bytes": max(part["peak_bytes"] for part in found),
        "grown_kib": grown,
        "second_judge": all(part["second_judge"] for part in found),
        "never_hit": [clause for clause, count in hits.items() if count == 0],
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mutations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=int, help="make and judge this one mutant, and print it")
    arguments = parser.parse_args()
    if arguments.only is not None:
        mutator = Mutator(arguments.seed)
        mutant = mutator.make(arguments.only)
        print(mutant.how, mutant.data.hex(), sep="\n")
        print(Judge(mutator.originals, find_second_judge()).judge(mutant))
        return 0
    result = run(arguments.mutations, arguments.seed, arguments.processes)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'clause':22} {'hits':>9} {'repaired':>9}")
    for clause, count in result["hits"].items():
        print(f"{clause:22} {count:9} {result['hits_repaired'].get(clause, 0):9}")
    for name in (
        "mutations",
        "seconds",
        "per_second",
        "accepted_unchanged",
        "decoded",
        "slowest_ms",
        "peak_bytes",
        "grown_kib",
        "second_judge",
        "never_hit",
    ):
        print(f"{name}: {result[name]}")
    for fault in result["faults"]:
        print(f"FAULT in mutant {fault['number']} ({fault['how']}): {fault['fault']}")
    return 1 if result["faults"] or result["never_hit"] else 0


if __name__ == "__main__":
    sys.exit(main())
