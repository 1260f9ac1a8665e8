"""A device with memory and a queue of its own that is the host's all the same, an agent that takes such memory, and ends made of both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from backends.cpu.device import CpuReferenceDevice, HostMemory
from bridge.devices import Buffer
from bridge.handoff import Decoder, PeerConfig, Prefiller, create_identity
from tests.handoff.local_agent import LocalAgent
from tests.handoff.pair import BOUNDS


class OwnMemory(HostMemory):
    device, index = "toy", 3


class ToyDevice(CpuReferenceDevice):
    """The reference with memory that it calls its own, and a queue that it calls the engine's."""

    name = "toy"
    memory, index = "toy", 3

    def __init__(self) -> None:
        self.attached: set[str] = set()
        self.marks: list[object] = []
        self.afters: list[object] = []

    def allocate_memory(self, nbytes: int) -> OwnMemory:
        return OwnMemory(nbytes)

    def attach(self) -> None:
        self.attached.add(threading.current_thread().name)

    def mark(self) -> object:
        self.marks.append(object())
        return self.marks[-1]

    def pack(self, *arguments, after=None) -> None:
        self.afters.append(after)
        super().pack(*arguments)

    def land(self, *arguments, after=None) -> None:
        self.afters.append(after)
        super().land(*arguments)

    def landing(self, cache, table, shares, keys, nbytes, memory, write_first, write_end, after=None) -> Callable[[Buffer], None]:
        self.afters.append(after)
        land = super().land

        def call(data: Buffer) -> None:
            assert data.size == nbytes
            land(cache, table, shares, keys, data, write_first, write_end)

        return call


class ToyAgent(LocalAgent):
    devices = ("toy",)


class Ends:
    """Both ends, with what each is given."""

    def __init__(self, folder: Path) -> None:
        self.prefill, self.decode = create_identity("prefill-0", folder), create_identity("decode-0", folder)
        self.open: list[Prefiller | Decoder] = []

    def prefiller(self, device, agent, **options) -> Prefiller:
        peers = {"decode-0": PeerConfig(self.decode.certificate)}
        self.open.append(Prefiller(self.prefill, peers, device, agent, staging_bytes=1 << 20, bounds=BOUNDS, **options))
        return self.open[-1]

    def decoder(self, prefiller: Prefiller, device, agent, **options) -> Decoder:
        peers = {"prefill-0": PeerConfig(self.prefill.certificate, "127.0.0.1", prefiller.port)}
        self.open.append(Decoder(self.decode, peers, device, agent, staging_bytes=1 << 20, bounds=BOUNDS, **options))
        return self.open[-1]
