"""A soak: many small hand-offs through ends that live on, and what they hold at the beginning and at the end.

    python benchmarks/soak.py [--count 100000] [--peers 2] [--agent nixl] [--warm 8192] [--json FILE]

Two processes, `peers` prefillers in one and as many decoders in the other; every landed page is compared. The first and the last tenth of
the hand-offs are compared: resident memory, descriptors, threads, registered bytes. Exit status 1 where anything failed, was wrong or grew
by more than `--allow` KiB of memory or by one descriptor, thread or registration.

`--warm` hand-offs of each prefiller come before those that are counted: until then memory grows by design, since each prefiller remembers
its last 8,192 requests and ended leases.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import peers

from bridge.handoff.leases import REMEMBERED


def after(side: dict[str, Any], warm: int) -> dict[str, Any]:
    """What a process reported from its `warm`th hand-off on, counted from there."""
    samples = [{**sample, "done": sample["done"] - warm} for sample in side["samples"] if sample["done"] >= warm]
    return {**side, "samples": samples}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="counted after the warm-up")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--agent", default="nixl")
    parser.add_argument("--allow", type=int, default=8192, help="KiB of resident memory by which a process may grow")
    parser.add_argument("--warm", type=int, default=REMEMBERED, help="hand-offs of each prefiller before those that are counted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warm = options.warm * options.peers
    plan = peers.Plan(options.peers, options.peers, warm + options.count, options.window, options.agent, latencies=False, samples=200)
    prefilled, decoded = peers.run(plan)
    found = peers.summary(plan, prefilled, decoded)
    found |= {"prefillers_hold": peers.tenths(after(prefilled, warm)), "decoders_hold": peers.tenths(after(decoded, warm))}
    found["samples"] = {"prefillers": prefilled["samples"], "decoders": decoded["samples"]}
    print(f"{datetime.date.today()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{found['committed']} hand-offs, {found['wrong']} wrong, {found['failed']} failed, {found['handoffs_per_second']:.0f} a second")
    print(f"compared after {warm}, when all is remembered that ever will be")
    grew = False
    for side in ("prefillers_hold", "decoders_hold"):
        for name, (first, last) in found[side].items():
            allowed = options.allow if name == "resident_kib" else 0.5
            grew |= last - first > allowed
            print(f"{side:17}{name:14} first tenth {first:14.1f}  last tenth {last:14.1f}{'  GREW' if last - first > allowed else ''}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if grew or found["wrong"] or found["failed"] or found["committed"] != plan.count else 0


if __name__ == "__main__":
    sys.exit(main())
