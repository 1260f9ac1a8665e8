"""Hand-offs between two hosts that are network namespaces of this machine, over a link of a given rate: 4-bit against raw.

    python benchmarks/links.py [--rates 1gbit 5gbit none] [--mib 64 256] [--rounds 3] [--faults] [--json FILE]

Makes two namespaces joined by a veth pair, shapes both ends with `tc ... tbf`, starts a prefiller in one and a decoder in the other, and
removes everything. Needs root, `ip` and `tc`. The agent is NIXL over UCX's tcp; blocks are verified as always. A row's time is that of
the decoder's fetch: from the claim to the last landing. park: the payload was packed before. stream: packing
goes on meanwhile. --faults: the link is cut and healed, and the prefiller is killed, stays away for a minute and comes back.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2
"""bf16 KV of one token: 128 KiB."""
HOSTS = {"prefiller": "10.231.77.1", "decoder": "10.231.77.2"}
PORT = 47110
MODEL = bytes(32)


class CannotMakeNamespaces(Exception):
    """This machine or this user cannot do it; the text says why."""


def why_not() -> str | None:
    """Why network namespaces cannot be made here, as one sentence, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root: run this with sudo, or in a container of your own"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} is missing: install iproute2"
    probe = f"kvbprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"this machine refuses network namespaces ({made.stderr.strip()}): CAP_SYS_ADMIN is needed"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return None


def _run(*command: str) -> None:
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise CannotMakeNamespaces(f"`{' '.join(command)}` failed: {made.stderr.strip()}")


class Network:
    """Two namespaces and the link between them. Made by `network`."""

    def __init__(self, suffix: str) -> None:
        self.names = {"prefiller": f"kvbp{suffix}", "decoder": f"kvbd{suffix}"}
        self.devices = {"prefiller": f"vp{suffix}", "decoder": f"vd{suffix}"}

    def make(self) -> None:
        for name in self.names.values():
            _run("ip", "netns", "add", name)
        first, second = self.devices.values()
        _run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for side, name in self.names.items():
            _run("ip", "link", "set", self.devices[side], "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{HOSTS[side]}/24", "dev", self.devices[side])
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self.up(True)

    def up(self, state: bool) -> None:
        """Plugs the cable in, or out: nobody is told, packets are lost."""
        for side, name in self.names.items():
            _run("ip", "-n", name, "link", "set", self.devices[side], "up" if state else "down")

    def silence(self, state: bool) -> None:
        """Packets go to a station that does not exist, in both directions; or to the right one again. Nobody is told: TCP backs off."""
        for role, other in (("prefiller", "decoder"), ("decoder", "prefiller")):
            neighbour, where = HOSTS[other], ("dev", self.devices[role])
            wrong = ("replace", neighbour, "lladdr", "02:00:00:00:00:99", *where, "nud", "permanent")
            _run("ip", "-n", self.names[role], "neigh", *(wrong if state else ("del", neighbour, *where)))

    def shape(self, rate: str | None, burst: str = "256kb") -> None:
        """Both directions. rate, burst: as tc writes them, such as 1gbit and 256kb; None: unshaped."""
        for side, name in self.names.items():
            where = ("-n", name, "qdisc")
            if rate is None:
                subprocess.run(["tc", *where, "del", "dev", self.devices[side], "root"], capture_output=True)
            else:
                _run("tc", *where, "replace", "dev", self.devices[side], "root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.devices["prefiller"]], capture_output=True)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network that is removed at the end. Raises CannotMakeNamespaces with one sentence."""
    reason = why_not()
    if reason is not None:
        raise CannotMakeNamespaces(reason)
    made = Network(str(os.getpid()))
    try:
        made.make()
        yield made
    finally:
        made.remove()


class End:
    """A process in a namespace that takes orders, one JSON line each. Raises RuntimeError with what it said where it fails."""

    def __init__(self, role: str, net: Network, folder: Path, **settings: Any) -> None:
        plan = {"role": role, "folder": str(folder), **settings}
        environment = {**os.environ, "UCX_TLS": "tcp,self", "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", net.names[role], sys.executable, __file__, "--child", json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.ready = self._answer()

    def order(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


@contextlib.contextmanager
def ends(net: Network, **settings: Any) -> Iterator[tuple[End, End, Path]]:
    """A prefiller and a decoder, and the folder with their certificates."""
    from bridge.handoff import create_identity

    with tempfile.TemporaryDirectory(prefix="kvbridge-links-") as name:
        folder = Path(name)
        for role in HOSTS:
            create_identity(role, folder)
        started: list[End] = []
        try:
            for role in HOSTS:
                started.append(End(role, net, folder, **settings))
            yield started[0], started[1], folder
        finally:
            for end in started:
                end.close()


# -- what runs inside a namespace


def child(plan: dict[str, Any]) -> None:
    import numpy as np
    import torch

    from bridge.codecs import declared
    from bridge.devices import open_device
    from bridge.errors import KVBridgeError
    from bridge.handoff import Bounds, Decoder, Identity, Mode, PeerConfig, Prefiller, Target, Ticket
    from bridge.pages import BlockTable, LayerPages, PagedCache
    from bridge.transfer.nixl import NixlAgent
    from bridge.wire import ContentKind, Element, Group, Layer, Manifest, token_digest

    torch.set_num_threads(1)
    role, folder, mib = plan["role"], Path(plan["folder"]), plan.get("mib", 64)
    other = "decoder" if role == "prefiller" else "prefiller"
    identity = Identity(role, folder / f"{role}.crt", folder / f"{role}.key")
    peers = {other: PeerConfig(folder / f"{other}.crt", HOSTS[other], PORT)}
    agent = NixlAgent(role, transports=["tcp", "self"], serves=role == "prefiller")
    bounds, device = Bounds(**plan.get("bounds", {})), open_device(plan.get("device", "cpu"))
    tokens, block = mib * (1 << 20) // TOKEN_BYTES, 16 if role == "prefiller" else 64
    pages = -(-tokens // block)
    table = BlockTable(np.random.default_rng(7).permutation(pages).tolist(), block)

    def side(seed: int) -> torch.Tensor:
        # One layer's values for all layers: what the link carries does not depend on them, and making them takes long.
        shape = (pages, block, HEADS, HEAD_DIM)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def tokens_of(pages_of_layer: torch.Tensor) -> torch.Tensor:
        page, position = table.locate(0, tokens, pages)
        return pages_of_layer[page, position]

    def expected() -> torch.Tensor:
        shape = (tokens, HEADS, HEAD_DIM)
        return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)

    def cache() -> PagedCache:
        if role == "decoder":
            blank = [torch.full((pages, block, HEADS, HEAD_DIM), float("nan"), dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
            return PagedCache({i: LayerPages.nhd(blank[2 * i], blank[2 * i + 1]) for i in range(LAYERS)})
        made, values = {}, expected()
        page, position = table.locate(0, tokens, pages)
        for index in range(LAYERS):
            both = [torch.zeros(pages, block, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in (0, 1)]
            for one in both:
                one[page, position] = values
            made[index] = LayerPages.nhd(*both)
        return PagedCache(made)

    def check(received: PagedCache, codec: str) -> float:
        """The largest relative error of any layer, squared; raises where it is too large."""
        values, worst = expected().float(), 0.0
        for layer in received.layers.values():
            for one in (layer.key, layer.value):
                assert one is not None
                error = ((tokens_of(one).float() - values) ** 2).sum() / (values**2).sum()
                worst = max(worst, error.item()) if not torch.isnan(error) else float("inf")
        if worst > (0.0 if codec == "raw" else 0.05):
            raise RuntimeError(f"{codec}: what arrived is not what was sent, error {worst}")
        return worst

    def say(**answer: Any) -> None:
        print(json.dumps(answer), flush=True)

    mine = cache()
    staging = 2 * mib << 20
    if role == "prefiller":
        prefiller = Prefiller(identity, peers, device, agent, staging_bytes=staging, host=HOSTS[role], port=PORT, bounds=bounds)
    else:
        decoder = Decoder(identity, peers, device, agent, staging_bytes=staging, bounds=bounds)
    say(tokens=tokens)
    packing: threading.Thread | None = None
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if order["do"] == "offer":
                if packing is not None:
                    packing.join()
                manifest = Manifest(
                    model_digest=MODEL,
                    content=((ContentKind.TOKENS, token_digest([0])),),
                    request_id=order["name"],
                    lease=0,
                    generation=0,
                    chunk_tokens=plan.get("chunk", 64),
                    groups=(Group(HEADS, HEAD_DIM, 0, tokens),),
                    codecs=(declared(order["codec"]).for_layer(HEAD_DIM, Element.BF16),),
                    layers=tuple(Layer(index, 0, 0) for index in range(LAYERS)),
                )
                offer = prefiller.offer(manifest, mine, table, mode=Mode(order["mode"]))
                packing = threading.Thread(target=_quietly, args=(offer.advance, tokens))
                packing.start()
                if order["mode"] == "park":
                    packing.join()
                say(ticket=offer.ticket.to_dict(), pack=offer.pack_seconds)
            elif order["do"] == "fetch":
                received = decoder.fetch(Ticket.from_dict(order["ticket"]), Target(mine, table, MODEL))
                times = {"total": received.total, "transfer": received.transfer, "land": received.land}
                if order.get("check"):
                    check(mine, order["check"])
                say(nbytes=received.nbytes, transports=agent.transports(), **times)
            elif order["do"] == "state":
                end: Any = prefiller if role == "prefiller" else decoder
                descriptors = len(os.listdir("/proc/self/fd"))
                say(staging=end.staging()[0], counters=end.counters.snapshot(), descriptors=descriptors, threads=threading.active_count())
        except KVBridgeError as error:
            say(failed=error.clause, said=str(error))
    (prefiller if role == "prefiller" else decoder).close()
    agent.close()


def _quietly(work: Any, *arguments: Any) -> None:
    from bridge.errors import KVBridgeError

    with contextlib.suppress(KVBridgeError):
        work(*arguments)


# -- what is measured


def crossing(prefiller: End, decoder: End, name: str, codec: str, mode: str, check: bool = False) -> dict[str, Any]:
    """One hand-off: the decoder's answer, with the seconds of packing, or `failed` and what was said."""
    offered = prefiller.order("offer", name=name, codec=codec, mode=mode)
    if "failed" in offered:
        return offered
    return {**decoder.order("fetch", ticket=offered["ticket"], check=codec if check else None), "pack": offered["pack"]}


def measure(
    net: Network,
    rate: str | None,
    mib: int,
    rounds: int,
    codecs: tuple[str, ...],
    modes: tuple[str, ...] = ("park", "stream"),
    chunk: int = 64,
) -> list[dict[str, Any]]:
    """The best of `rounds` of each codec and mode, the codecs taking turns."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    net.shape(rate)
    with ends(net, mib=mib, chunk=chunk) as (prefiller, decoder, _):
        for codec in codecs:  # compiles kernels, opens connections, and checks what arrives
            crossing(prefiller, decoder, "first", codec, "park", check=True)
        for number in range(rounds):
            for mode in modes:
                for codec in codecs:
                    row = crossing(prefiller, decoder, f"r{number}", codec, mode)
                    if "failed" in row:
                        raise RuntimeError(f"{codec} at {rate}: {row['said']}")
                    best = rows.get((mode, codec))
                    if best is None or row["total"] < best["total"]:
                        rows[mode, codec] = {"rate": rate or "unshaped", "mib": mib, "mode": mode, "codec": codec, **row}
    for (mode, codec), row in rows.items():
        row["gbit"] = row["nbytes"] * 8e-9 / row["total"]
        row["faster"] = rows[mode, "raw"]["total"] / row["total"]
        del row["transports"], codec
    return list(rows.values())


def faults(net: Network, cuts: tuple[float, ...], away: float) -> list[dict[str, Any]]:
    """What came of: a link that is cut in mid-transfer for each of `cuts` seconds, and a prefiller that is killed and stays away.

    Each row: what happened, the failures by clause until it worked again ("right" counts hand-offs), seconds until then.
    """
    rows: list[dict[str, Any]] = []
    number = 0

    def until_right(what: str, prefiller: End, decoder: End, start: float, limit: float = 120.0) -> None:
        nonlocal number
        said: dict[str, int] = {}
        while "right" not in said and time.monotonic() - start < limit:
            number += 1
            answer = crossing(prefiller, decoder, f"r{number}", "raw", "park", check=True)
            clause = answer.get("failed", "right")
            said[clause] = said.get(clause, 0) + 1
        rows.append({"what": what, "said": said, "seconds": time.monotonic() - start})

    net.shape("1gbit")
    bounds = {"connect": 3, "claim": 5, "chunk": 10, "transfer": 10, "lease": 30, "heartbeat": 1, "silence": 5}
    settings = {"mib": 64, "bounds": bounds, "device": "cpu-reference"}
    with ends(net, **settings) as (prefiller, decoder, folder):
        until_right("before", prefiller, decoder, time.monotonic())
        for seconds in cuts:
            offered = prefiller.order("offer", name=f"cut {seconds}", codec="raw", mode="park")
            timers = [threading.Timer(0.2, net.up, [False]), threading.Timer(0.2 + seconds, net.up, [True])]
            start = time.monotonic()
            for timer in timers:
                timer.start()
            answer = decoder.order("fetch", ticket=offered["ticket"], check="raw")
            said = {answer.get("failed", "right"): 1}
            rows.append({"what": f"cut for {seconds} s in mid-transfer", "said": said, "seconds": time.monotonic() - start})
            for timer in timers:
                timer.join()
            until_right(f"healed after {seconds} s", prefiller, decoder, time.monotonic())
        prefiller.kill()
        start, gone = time.monotonic(), {}
        while time.monotonic() - start < away:
            ticket = {"peer": "prefiller", "request_id": "a", "lease": "0" * 16, "generation": 1}
            clause = decoder.order("fetch", ticket=ticket).get("failed", "right")
            gone[clause] = gone.get(clause, 0) + 1
            time.sleep(1)
        rows.append({"what": f"prefiller killed, away for {away:.0f} s", "said": gone, "seconds": time.monotonic() - start})
        again = End("prefiller", net, folder, **settings)
        try:
            until_right("started again under the same name", again, decoder, time.monotonic())
        finally:
            state = decoder.order("state")
            rows.append({"what": "left at the decoder", "said": {"bytes of staging": state["staging"]}, "seconds": 0.0})
            again.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "5gbit", "none"])
    parser.add_argument("--mib", nargs="+", type=int, default=[64, 256], help="raw bf16 KV of the request, MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=["raw", "turboquant_4bit_nc"])
    parser.add_argument("--modes", nargs="+", default=["park", "stream"])
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--away", type=float, default=60, help="seconds for which the killed prefiller stays away")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    rows: list[dict[str, Any]] = []
    try:
        with network() as net:
            for rate in [] if options.faults else options.rates:
                for mib in options.mib:
                    rows += measure(
                        net,
                        None if rate == "none" else rate,
                        mib,
                        options.rounds,
                        tuple(options.codecs),
                        tuple(options.modes),
                        options.chunk,
                    )
            said = faults(net, (1.0, 20.0), options.away) if options.faults else []
    except CannotMakeNamespaces as error:
        print(f"cannot measure links: {error}", file=sys.stderr)
        return 2
    print(f"{datetime.date.today()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    if rows:
        print("| link | raw KV | mode | codec | MB on the link | packed before, s | fetch s | read s | land s | Gb/s | against raw |")
        print("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        before = row["pack"] if row["mode"] == "park" else 0.0
        figures = f"{before:.2f} | {row['total']:.3f} | {row['transfer']:.3f} | {row['land']:.3f} | {row['gbit']:.2f}"
        where = f"{row['rate']} | {row['mib']} MiB | {row['mode']} | {row['codec']}"
        print(f"| {where} | {row['nbytes'] / 1e6:.1f} | {figures} | {row['faster']:.2f} |")
    for row in said:
        came = ", ".join(f"{clause} {count}" for clause, count in row["said"].items())
        print(f"| {row['what']} | {came} | {row['seconds']:.1f} s |")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "faults": said}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
