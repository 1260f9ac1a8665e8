"""The demonstration's second process: a decoder that is driven by JSON lines from the process that started it."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from bridge.errors import KVBridgeError


class Receiver:
    """Holds the model and the decoder; `handle` takes one order and returns its answer."""

    def __init__(self, threads: int, block_size: int, device: str) -> None:
        from bridge.demo.model import load_model
        from bridge.devices import open_device

        self._block_size = block_size
        self._model = load_model(threads=threads)
        self._agent: Any = None
        self._device = open_device(device)
        self._decoder: Any = None

    def open(self, order: dict[str, Any]) -> dict[str, Any]:
        """Connects to the prefiller that the order names."""
        from bridge.handoff import Decoder, Identity, PeerConfig
        from bridge.transfer.choose import open_agent

        identity = Identity(order["name"], Path(order["certificate"]), Path(order["private_key"]))
        peer = PeerConfig(Path(order["peer_certificate"]), order["host"], order["port"])
        peers = {order["peer"]: peer}
        self._agent = open_agent(order["agent"], f"kvbridge-demo-decoder-{os.getpid()}", identity=identity, peers=peers, serves=False)
        self._decoder = Decoder(identity, peers, self._device, self._agent, staging_bytes=order["staging_bytes"])
        return {"pid": os.getpid()}

    def fetch(self, order: dict[str, Any]) -> dict[str, Any]:
        """Fetches a ticket's payload into fresh pages full of NaN, and decodes greedily from them."""
        from bridge.demo.paged import empty_pages, from_pages
        from bridge.handoff import Target, Ticket

        geometry = self._model.geometry
        shape = (geometry.layers, geometry.kv_heads, geometry.head_dim)
        cache, table = empty_pages(shape, order["tokens"], block_size=self._block_size, layout="HND", seed=2)
        received = self._decoder.fetch(Ticket.from_dict(order["ticket"]), Target(cache, table, self._model.digest))
        layers = from_pages(cache, table, order["tokens"])
        decoded = self._model.decode(layers, order["first_token"], order["count"]) if order["count"] else None
        return {
            "tokens": decoded.tokens if decoded else [],
            "nbytes": received.nbytes,
            "total": received.total,
            "transfer": received.transfer,
            "land": received.land,
            "staging": self._decoder.staging()[0],
            "transports": self._agent.transports(),
        }

    def close(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._decoder is None:
            return {"registered": 0}
        self._decoder.close()
        self._agent.close()
        return {"registered": self._agent.registered_bytes()}


def _read(lines: TextIO, orders: queue.Queue[str]) -> None:
    """Also sees that the process that started this one is gone, whatever this one does: it may not outlive it."""
    for line in lines:
        orders.put(line)
    os._exit(1)


def serve(orders: queue.Queue[str], answers: TextIO, threads: int, block_size: int, device: str) -> None:
    """Answers each line of `orders` with one line; a failure is answered with its clause and sentence."""

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        receiver = Receiver(threads, block_size, device)
    except KVBridgeError as error:
        answer({"error": str(error), "clause": error.clause})
        return
    answer({"ready": os.getpid()})
    handlers = {"open": receiver.open, "fetch": receiver.fetch, "close": receiver.close}
    while True:
        order = json.loads(orders.get())
        try:
            answer(handlers[order["order"]](order))
        except KVBridgeError as error:
            answer({"error": str(error), "clause": error.clause})
        if order["order"] == "close":
            return


def main() -> None:
    """`python -m bridge.demo.decoder_process THREADS BLOCK_SIZE DEVICE`; standard output carries answers only."""
    orders: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(sys.stdin, orders), daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(orders, answers, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])


if __name__ == "__main__":
    main()
