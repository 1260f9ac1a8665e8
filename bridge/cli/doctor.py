"""Say which transfer agents and devices work on this host, and how fast a loopback read is with each.

Each agent that is installed serves 32 MiB to a second one of the same process and reads them back, so what is printed was tried. The speed
is of this host alone, over its loopback. Exit code 0 if at least one agent and one device work, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bridge.errors import KVBridgeError
from bridge.transfer.choose import KINDS, open_agent

PROBE_BYTES = 32 << 20
PROBE_SECONDS = 30.0
TRUST = {
    "nixl": "not encrypted, not authenticated, reads unregistered memory if asked: for trusted networks only",
    "ucx": "not encrypted, not authenticated: for trusted networks only",
    "stream": "TLS 1.3, both ends authenticated: for any network",
}


class ProbeFailed(KVBridgeError):
    """An agent started, and did not carry the right bytes in time."""

    clause = "probe_failed"


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    agents = {}
    for kind in KINDS:
        _progress(f"trying the agent {kind}")
        agents[kind] = agent_report(kind)
    _progress("trying the devices")
    report = {"agents": agents, "devices": device_report()}
    if options.json:
        json.dump(report, sys.stdout, indent=1)
        print()
    else:
        print(as_text(report))
    return 0 if all(any(one["works"] for one in part.values()) for part in report.values()) else 1


def _progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def agent_report(kind: str) -> dict[str, Any]:
    """{"works", "says", "trust"} and, where it works, "gbps": gigabytes (1e9) a second over loopback."""
    try:
        gbps, says = probe(kind)
    except (KVBridgeError, OSError) as error:
        return {"works": False, "says": str(error), "trust": TRUST[kind]}
    return {"works": True, "says": says, "trust": TRUST[kind], "gbps": round(gbps, 3)}


def probe(kind: str) -> tuple[float, str]:
    """(gigabytes a second, what the agent says of its transports). Raises KVBridgeError or OSError."""
    import numpy as np

    from bridge.handoff.identity import PeerConfig, create_identity
    from bridge.transfer.agent import Memory, ReadRange, RemoteMemory

    theirs = np.frombuffer(secrets.token_bytes(1 << 20) * (PROBE_BYTES >> 20), np.uint8)
    mine = np.zeros(PROBE_BYTES, np.uint8)
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvbridge-doctor-")))
        owner, reader = create_identity("owner", folder), create_identity("reader", folder)
        at = PeerConfig(owner.certificate, "127.0.0.1")
        serving = open_agent(kind, "doctor-owner", identity=owner, peers={"reader": PeerConfig(reader.certificate)}, serves=True)
        cleanup.callback(serving.close)
        reading = open_agent(kind, "doctor-reader", identity=reader, peers={"owner": at}, serves=False)
        cleanup.callback(reading.close)
        serving.register(Memory(theirs.ctypes.data, PROBE_BYTES, owner=theirs))
        target = reading.register(Memory(mine.ctypes.data, PROBE_BYTES, owner=mine))
        peer = reading.connect(serving.metadata())
        seconds = []
        for _ in range(2):  # the first also wires both ends up
            mine[:] = 0
            start = time.perf_counter()
            transfer = peer.read(RemoteMemory(theirs.ctypes.data, PROBE_BYTES), target, [ReadRange(0, 0, PROBE_BYTES)])
            while not transfer.done():
                if time.perf_counter() - start > PROBE_SECONDS:
                    raise ProbeFailed(f"{PROBE_BYTES} bytes did not arrive within {PROBE_SECONDS:.0f} s")
                time.sleep(0.0005)
            seconds.append(time.perf_counter() - start)
            transfer.release()
            if not np.array_equal(mine, theirs):
                raise ProbeFailed("other bytes arrived than were served")
        says = reading.transports()
        peer.disconnect()
    return PROBE_BYTES / min(seconds) / 1e9, says


def device_report() -> dict[str, Any]:
    """{"works", "says"} of every device whose backend is installed."""
    from bridge.devices import device_names, open_device

    found: dict[str, Any] = {}
    for name in device_names():
        try:
            found[name] = {"works": True, "says": open_device(name).probe()}
        except KVBridgeError as error:
            found[name] = {"works": False, "says": str(error)}
    return found


def as_text(report: dict[str, Any]) -> str:
    """Lines for people."""
    lines = ["transfer agents"]
    for kind, one in report["agents"].items():
        speed = f"{one['gbps']:.2f} GB/s over loopback; " if one["works"] else ""
        lines += [f"  {kind:<8} {'works' if one['works'] else 'does not work'}: {speed}{one['says']}", f"           {one['trust']}"]
    lines.append("devices")
    lines += [f"  {name:<14} {'works' if one['works'] else 'does not work'}: {one['says']}" for name, one in report["devices"].items()]
    return "\n".join(lines)
