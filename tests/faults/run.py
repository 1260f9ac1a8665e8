"""The fault table: `python -m tests.faults.run --runs 10000 --seed 1`.

Every run injects one fault at one step of a hand-off and has both ends judged: the right bytes or a typed, counted failure, never another
request's content, nothing left behind. Prints how often each fault met a hand-off at each step, and what it ended in. Exit status 1 where
something was wrong, or where a cell was never met. `--only NUMBER` runs one again, and fails only where something was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import faulty_channel
from tests.faults.rig import Ended, Rig, Wrong
from tests.faults.scenarios import CELLS, FAULTS, run_one

MAX_WRONG = 20
MAX_NAMED = 20
"""Cells that were not met are named up to so many."""
Row = tuple[int, str, str, list[Ended], bool]


def without_verification() -> None:
    """The CPU's reference lands without looking at tags: only to show that the judge notices. The product has no such switch."""
    from backends.cpu import reference

    reference.verify_tags = lambda *arguments: None  # type: ignore[assignment]


class Worker:
    """Runs numbers from a shared counter on rigs of its own, one in each thread."""

    def __init__(self, numbers: Any, seed: int, rigs: int, deadline: float) -> None:
        self._numbers, self._seed, self._deadline = numbers, seed, deadline
        self.rows: list[Row] = []
        self.wrong: list[tuple[int, str]] = []
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._work) for _ in range(rigs)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._numbers, None) if time.monotonic() < self._deadline and len(self.wrong) < MAX_WRONG else None

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="kvbridge-faults-") as folder:
            fresh = (Path(folder) / str(number) for number in itertools.count())
            rig = Rig(next(fresh))
            while (number := self._next()) is not None:
                try:
                    row = (number, *run_one(rig, number, self._seed))
                    with self._lock:
                        self.rows.append(row)
                except Exception as error:
                    fault, step = CELLS[number % len(CELLS)]
                    said = str(error) if isinstance(error, Wrong) else "".join(traceback.format_exception(error))
                    with self._lock:
                        self.wrong.append((number, f"{fault.name} at {step}: {said}"))
                    rig.close()
                    rig = Rig(next(fresh))
            rig.close()


def _process(numbers: Sequence[int], seed: int, rigs: int, seconds: float, verified: bool, answers: Any) -> None:
    faulty_channel.install()
    if not verified:
        without_verification()
    sys.setswitchinterval(0.0005)
    worker = Worker(iter(numbers), seed, rigs, time.monotonic() + seconds)
    worker.run()
    answers.put((worker.rows, worker.wrong))


def run(numbers: Sequence[int], seed: int, *, processes: int = 2, rigs: int = 6, seconds: float = 1800, verified: bool = True) -> Any:
    """(rows, what was wrong) of the runs of these numbers, in fresh processes. Stops after `seconds`."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    started = [
        context.Process(target=_process, args=(numbers[share::processes], seed, rigs, seconds, verified, answers), daemon=True)
        for share in range(processes)
    ]
    for process in started:
        process.start()
    rows, wrong = [], []
    for _ in started:
        more_rows, more_wrong = answers.get(timeout=seconds + 120)
        rows += more_rows
        wrong += more_wrong
    for process in started:
        process.join(30)
    return sorted(rows, key=lambda row: row[0]), sorted(wrong)


def table(rows: list[Row]) -> dict[tuple[str, str], tuple[int, Counter[str], Counter[str]]]:
    """(fault, step) -> how often it was met; what the decoders said; what the prefillers said."""
    met: Counter[tuple[str, str]] = Counter()
    decoders: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    prefillers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for _, fault, step, ended, was_met in rows:
        if was_met:
            met[fault, step] += 1
            decoders[fault, step].update(one.decoder for one in ended)
            prefillers[fault, step].update(one.prefiller for one in ended)
    cells = [(fault.name, step) for fault, step in CELLS]
    return {cell: (met[cell], decoders[cell], prefillers[cell]) for cell in cells}


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{name or 'nothing'} {count}" for name, count in counts.most_common())


def printed(counted: dict[tuple[str, str], tuple[int, Counter[str], Counter[str]]]) -> list[str]:
    """The lines to print of a table: one a cell that was met, and one that says how many were not, by name where they are few."""
    lines = [f"{'fault':26}{'step':22}{'met':>6}  decoders said; prefillers said"]
    lines += [
        f"{fault:26}{step:22}{met:6}  {_said(decoders)}; {_said(prefillers)}"
        for (fault, step), (met, decoders, prefillers) in counted.items()
        if met
    ]
    never = [f"{fault} at {step}" for (fault, step), (met, *_) in counted.items() if not met]
    if never:
        names = ": " + ", ".join(never) if len(never) <= MAX_NAMED else ""
        lines.append(f"not met: {len(never)} of {len(counted)} cells{names}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rigs", type=int, default=6, help="pairs of ends in each process, since most of the time is waiting")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after so many")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this run only")
    parser.add_argument("--without-verification", action="store_true", help="show that the judge notices wrong content: must fail")
    parser.add_argument("--json", type=Path, help="also write the table there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, too
    start, first, runs = time.monotonic(), options.only or 0, 1 if options.only is not None else options.runs
    rows, wrong = [], []
    batch = max(options.runs // 10, 500)
    while runs > 0 and len(wrong) < MAX_WRONG and time.monotonic() - start < options.seconds:
        count = min(batch, runs)
        more_rows, more_wrong = run(
            range(first, first + count),
            options.seed,
            processes=min(options.processes, count),
            rigs=options.rigs,
            seconds=options.seconds - (time.monotonic() - start),
            verified=not options.without_verification,
        )
        rows, wrong = rows + more_rows, wrong + more_wrong
        first, runs = first + count, runs - count
        for number, what in more_wrong:
            print(f"WRONG: run {number}: {what}", file=sys.stderr, flush=True)
        print(f"{len(rows)} runs, {len(wrong)} wrong, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    counted = table(rows)
    print("\n".join(printed(counted)))
    for number, what in wrong:
        print(f"WRONG: run {number} of seed {options.seed}: {what}")
    met = sum(met for met, *_ in counted.values())
    complete = all(met for met, *_ in counted.values())
    print(
        f"{len(rows)} runs of seed {options.seed}: {len(FAULTS)} faults, {len(CELLS)} cells, {met} met, {len(wrong)} wrong, "
        f"{time.monotonic() - start:.0f} s"
    )
    if options.json:
        data = [[*cell, met, dict(d), dict(p)] for cell, (met, d, p) in counted.items()]
        options.json.write_text(json.dumps({"seed": options.seed, "runs": len(rows), "wrong": wrong, "table": data}, indent=1))
    return 1 if wrong or (not complete and options.only is None) else 0


if __name__ == "__main__":
    sys.exit(main())
