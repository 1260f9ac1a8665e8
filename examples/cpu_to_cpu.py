"""A CPU prefills, a CPU decodes: the whole hand-off in one file, two processes, random KV instead of a model.

python examples/cpu_to_cpu.py [codec]        (default: turboquant_4bit_nc)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bridge.codecs import declared
from bridge.devices import open_device
from bridge.errors import KVBridgeError
from bridge.handoff import Decoder, Identity, PeerConfig, Prefiller, Target, Ticket, create_identity
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.transfer.nixl import NixlAgent
from bridge.wire import ContentKind, Element, Group, Layer, Manifest, token_digest

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 2, 64, 1000
MODEL = bytes(32)  # in earnest: bridge.model.model_digest(config, weights)


def make_pages(block_size: int, fill: float | None = None) -> tuple[PagedCache, BlockTable]:
    """Scattered pages of random values, or all of one value."""
    count = -(-TOKENS // block_size) + 3
    shape = (count, block_size, HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)

    def side() -> torch.Tensor:
        values = torch.randn(shape, generator=generator) if fill is None else torch.full(shape, fill)
        return values.to(torch.bfloat16)

    order = torch.randperm(count, generator=generator)[: count - 3].tolist()
    return PagedCache({layer: LayerPages.nhd(side(), side()) for layer in range(LAYERS)}), BlockTable(order, block_size)


def checksum(cache: PagedCache, table: BlockTable) -> list[float]:
    """One number a layer, which both processes can compare."""
    sums = []
    for pages in cache.layers.values():
        page, position = table.locate(0, TOKENS, pages.key.shape[0])
        sums.append(round(pages.key[page, position].double().abs().sum().item(), 3))
    return sums


def decode(folder: Path) -> None:
    """The second process: reads a ticket from standard input, fetches, prints what it has."""
    line = sys.stdin.readline()
    if not line:
        return  # the first process is gone, and has said why
    order = json.loads(line)
    identity = Identity("decode-0", folder / "decode-0.crt", folder / "decode-0.key")
    peers = {"prefill-0": PeerConfig(folder / "prefill-0.crt", "127.0.0.1", order["port"])}
    agent = NixlAgent("decode-0", serves=False)
    decoder = Decoder(identity, peers, open_device("cpu"), agent, staging_bytes=1 << 26)
    cache, table = make_pages(block_size=64, fill=float("nan"))
    received = decoder.fetch(Ticket.from_dict(order["ticket"]), Target(cache, table, MODEL))
    print(json.dumps({"bytes": received.nbytes, "seconds": received.total, "sums": checksum(cache, table), "via": agent.transports()}))
    decoder.close()
    agent.close()


def prefill(folder: Path, codec: str) -> None:
    """The first process: offers a payload, hands the ticket on, waits for the commit."""
    sides = declared(codec).for_layer(HEAD_DIM, Element.BF16)
    identity, other = create_identity("prefill-0", folder), create_identity("decode-0", folder)
    print("opening the device: its code is compiled first, some 20 s, minutes on a busy host", file=sys.stderr)
    agent = NixlAgent("prefill-0")
    prefiller = Prefiller(identity, {"decode-0": PeerConfig(other.certificate)}, open_device("cpu"), agent, staging_bytes=1 << 26)
    second = subprocess.Popen([sys.executable, __file__, "--decode", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    cache, table = make_pages(block_size=16)
    manifest = Manifest(
        model_digest=MODEL,
        content=((ContentKind.TOKENS, token_digest(list(range(TOKENS)))),),
        request_id="example",
        lease=0,
        generation=0,
        chunk_tokens=256,
        groups=(Group(HEADS, HEAD_DIM, 0, TOKENS),),
        codecs=(sides,),
        layers=tuple(Layer(layer, 0, 0) for layer in range(LAYERS)),
    )
    offer = prefiller.offer(manifest, cache, table)
    offer.advance(TOKENS)
    try:
        said, _ = second.communicate(json.dumps({"port": prefiller.port, "ticket": offer.ticket.to_dict()}) + "\n", timeout=300)
    finally:
        second.kill()
    offer.wait(10)
    result = json.loads(said)
    print(f"{codec}: {result['bytes']:,} bytes in {result['seconds'] * 1e3:.1f} ms, {result['via']}")
    print(f"sum of |K| by layer, sent:     {checksum(cache, table)}")
    print(f"sum of |K| by layer, received: {result['sums']}")
    change = max(abs(got / was - 1) for got, was in zip(result["sums"], checksum(cache, table), strict=True))
    print(f"largest difference: {change:.3%}; a codec that is not raw changes each value a little")
    prefiller.close()
    agent.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--decode"]:
        decode(Path(sys.argv[2]))
    elif "-h" in sys.argv or "--help" in sys.argv:
        print((__doc__ or "").strip())
    elif len(sys.argv) > 2:
        print((__doc__ or "").strip(), file=sys.stderr)
        sys.exit(2)
    else:
        with tempfile.TemporaryDirectory() as made:
            try:
                prefill(Path(made), sys.argv[1] if len(sys.argv) > 1 else "turboquant_4bit_nc")
            except KVBridgeError as error:
                print(error, file=sys.stderr)
                sys.exit(2)
