"""The hand-off between two devices of any kind, two processes, random KV instead of a model: what the examples of one pair each run.

python examples/device_pair.py PREFILLER DECODER [codec] [auto|device|host]     for example: xpu cpu turboquant_4bit_nc host

Where "xpu" is asked for and no Intel GPU is here, the emulated one runs instead; the output says which ran. The last argument is where
payloads are staged: in the devices' own memory, in the host's (pinned), or "auto", the former where the transfer agent can register it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import torch

from bridge.codecs import declared
from bridge.devices import Device, DeviceError, open_device
from bridge.errors import KVBridgeError
from bridge.handoff import Decoder, Identity, PeerConfig, Prefiller, Target, Ticket, create_identity
from bridge.handoff.staging import Where
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.transfer.nixl import NixlAgent
from bridge.wire import ContentKind, Element, Group, Layer, Manifest, token_digest

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 2, 64, 1000
MODEL = bytes(32)  # in earnest: bridge.model.model_digest(config, weights)


def opened(name: str) -> tuple[Device, str]:
    """The device, and one sentence on what it is. Raises DeviceError where neither it nor an emulation of it can work."""
    try:
        device = open_device(name)
    except DeviceError:
        if name != "xpu":
            raise
        device = open_device("xpu-emulated")
    kind = "emulated" if device.name == "xpu-emulated" else "real"
    return device, f"{name} ({kind}): {device.probe()}"


def make_pages(device: Device, block_size: int, fill: float | None = None) -> tuple[PagedCache, BlockTable]:
    """Scattered pages of random values, or all of one value, in the device's memory."""
    count = -(-TOKENS // block_size) + 3
    shape = (count, block_size, HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)

    def side() -> torch.Tensor:
        values = torch.randn(shape, generator=generator) if fill is None else torch.full(shape, fill)
        return values.to(getattr(device, "torch_device", "cpu"), torch.bfloat16)

    order = torch.randperm(count, generator=generator)[: count - 3].tolist()
    return PagedCache({layer: LayerPages.nhd(side(), side()) for layer in range(LAYERS)}), BlockTable(order, block_size)


def checksum(cache: PagedCache, table: BlockTable) -> list[float]:
    """One number a layer, which both processes can compare."""
    sums = []
    for pages in cache.layers.values():
        page, position = (torch.from_numpy(x).to(pages.key.device) for x in table.locate(0, TOKENS, pages.key.shape[0]))
        sums.append(round(pages.key[page, position].double().abs().sum().item(), 3))
    return sums


def decode(folder: Path, name: str, staging: str) -> None:
    """The second process: says that it is ready, reads a ticket from standard input, fetches, prints what it has."""
    device, what = opened(name)
    agent = NixlAgent("decode-0", serves=False)
    cache, table = make_pages(device, block_size=64, fill=float("nan"))
    print("ready", flush=True)
    line = sys.stdin.readline()
    if not line:
        return  # the first process is gone, and has said why
    order = json.loads(line)
    identity = Identity("decode-0", folder / "decode-0.crt", folder / "decode-0.key")
    peers = {"prefill-0": PeerConfig(folder / "prefill-0.crt", "127.0.0.1", order["port"])}
    decoder = Decoder(identity, peers, device, agent, staging_bytes=1 << 26, staging=staging)  # type: ignore[arg-type]
    received = decoder.fetch(Ticket.from_dict(order["ticket"]), Target(cache, table, MODEL))
    said = {"bytes": received.nbytes, "seconds": received.total, "sums": checksum(cache, table), "via": agent.transports(), "what": what}
    print(json.dumps(said))
    decoder.close()
    agent.close()


def prefill(folder: Path, name: str, other_name: str, codec: str, staging: str) -> bool:
    """The first process: offers a payload, hands the ticket on, waits for the commit. True: it arrived, within the codec's loss."""
    manifest = Manifest(
        model_digest=MODEL,
        content=((ContentKind.TOKENS, token_digest(list(range(TOKENS)))),),
        request_id="example",
        lease=0,
        generation=0,
        chunk_tokens=256,
        groups=(Group(HEADS, HEAD_DIM, 0, TOKENS),),
        codecs=(declared(codec).for_layer(HEAD_DIM, Element.BF16),),
        layers=tuple(Layer(layer, 0, 0) for layer in range(LAYERS)),
    )
    device, what = opened(name)
    identity, other = create_identity("prefill-0", folder), create_identity("decode-0", folder)
    command = [sys.executable, __file__, "--decode", str(folder), other_name, staging]
    second = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if second.stdout is None or second.stdout.readline() != "ready\n":
        second.wait()  # it has said why
        return False
    print("both devices are open; kernels are compiled on the way, which may take a minute", file=sys.stderr)
    agent = NixlAgent("prefill-0")
    peers = {"decode-0": PeerConfig(other.certificate)}
    prefiller = Prefiller(identity, peers, device, agent, staging_bytes=1 << 26, staging=staging)  # type: ignore[arg-type]
    cache, table = make_pages(device, block_size=16)
    offer = prefiller.offer(manifest, cache, table)
    offer.advance(TOKENS)
    try:
        said, _ = second.communicate(json.dumps({"port": prefiller.port, "ticket": offer.ticket.to_dict()}) + "\n", timeout=900)
    finally:
        second.kill()
    if not said:
        return False
    offer.wait(10)
    result, sent = json.loads(said), checksum(cache, table)
    print(f"prefiller: {what}")
    print(f"decoder:   {result['what']}")
    print(f"{codec}: {result['bytes']:,} bytes in {result['seconds'] * 1e3:.1f} ms, kernels compiled on the way, {result['via']}")
    print(f"sum of |K| by layer, sent:     {sent}")
    print(f"sum of |K| by layer, received: {result['sums']}")
    prefiller.close()
    agent.close()
    return all(abs(a - b) <= 0.03 * a for a, b in zip(sent, result["sums"], strict=True))


def run(prefiller: str, decoder: str, codec: str = "turboquant_4bit_nc", staging: str = "auto") -> int:
    """The whole hand-off. Returns an exit code: 0 where what arrived is what was sent, within the codec's loss."""
    if staging not in get_args(Where):
        print(f"there is no staging {staging!r}; choose one of {', '.join(get_args(Where))}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        try:
            return 0 if prefill(Path(made), prefiller, decoder, codec, staging) else 1
        except KVBridgeError as error:
            print(error, file=sys.stderr)
            return 2


def example(usage: str, prefiller: str, decoder: str, staging: str | None = None) -> int:
    """The script of one pair. Its arguments are the codec and, where `staging` does not fix it, the staging. Returns an exit code."""
    given = sys.argv[1:]
    if "-h" in given or "--help" in given:
        print(usage.strip())
        return 0
    if len(given) > (2 if staging is None else 1):
        print(usage.strip(), file=sys.stderr)
        return 2
    codec = given[0] if given else "turboquant_4bit_nc"
    return run(prefiller, decoder, codec, staging or (given[1] if len(given) > 1 else "auto"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--decode"]:
        try:
            decode(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
        except KVBridgeError as error:
            sys.exit(str(error))
    elif "-h" in sys.argv or "--help" in sys.argv:
        print((__doc__ or "").strip())
    elif len(sys.argv) in (3, 4, 5):
        sys.exit(run(*sys.argv[1:]))
    else:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
