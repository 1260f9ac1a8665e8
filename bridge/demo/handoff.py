"""The demonstration itself: this process prefills and offers, a second one fetches and decodes, and the tokens are compared."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.demo.errors import BadPrompt, DemoError
from bridge.demo.report import Demonstration, Row
from bridge.devices import Device
from bridge.errors import KVBridgeError
from bridge.handoff import Identity, Mode, Offer, Prefiller
from bridge.wire import Element, Manifest

ANSWER_SECONDS = 300.0
STAGING_BYTES = 512 << 20
"""On each side: more than the model's longest context takes as bf16. Memory that is not touched is not used."""
THREADS = 1
"""Both processes need the same number for equal sums; with one, two processes on few cores do not wait for each other's threads."""


class SecondProcessFailed(DemoError):
    """The decoder process reported a failure, ended, or did not answer."""

    clause = "second_process"


class SecondProcess:
    """The decoder process: one JSON line each way at a time."""

    def __init__(self, block_size: int, device: str) -> None:
        command = [sys.executable, "-m", "bridge.demo.decoder_process", str(THREADS), str(block_size), device]
        # A group of its own: an interrupt at the terminal is for this process, which ends that one; Python would answer it there, too.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()
        self.pid = self._process.pid

    def _collect(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def answer(self) -> dict[str, Any]:
        """The next line. Raises SecondProcessFailed."""
        try:
            line = self._lines.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise SecondProcessFailed(f"the decoder process did not answer within {ANSWER_SECONDS:.0f} s") from None
        if not line:
            code = self._process.wait(10)
            raise SecondProcessFailed(f"the decoder process ended with code {code}", remedy="its own message is above")
        values: dict[str, Any] = json.loads(line)
        if "error" in values:
            raise SecondProcessFailed(f"the decoder process: {values['error']}")
        return values

    def order(self, name: str, /, **values: Any) -> dict[str, Any]:
        """Sends an order and waits for its answer. Raises SecondProcessFailed."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps({"order": name, **values}) + "\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says why
        return self.answer()

    def end(self) -> None:
        """Stops the process, whatever it does."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Settings:
    """What to demonstrate. prompt: text, or None for the default. block_sizes: tokens of a page here and there. keep: a folder, or None."""

    codecs: Sequence[str]
    prompt: str | None
    count: int
    block_sizes: tuple[int, int]
    mode: str
    port: int
    keep: Path | None
    device: str
    decoder_device: str
    agent: str


def demonstrate(settings: Settings, progress: Callable[[str], None]) -> Demonstration:
    """See `kvbridge demo --help`. What can be wrong without a model is found before one is loaded. Raises KVBridgeError or OSError."""
    from bridge.demo.model import find_weights
    from bridge.devices import open_device
    from bridge.handoff import PeerConfig, create_identity
    from bridge.handoff.bounds import Bounds
    from bridge.transfer.choose import open_agent

    if settings.prompt is not None and not settings.prompt.strip():
        raise BadPrompt("the prompt is empty", remedy="give it some text")
    find_weights()
    if settings.keep is not None:
        try:
            settings.keep.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(settings.keep)) from None
    if settings.device == "cpu":
        progress("compiling the CPU's code, some 20 s")
    device = open_device(settings.device)
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvbridge-demo-")))
        identities = create_identity("prefiller", folder), create_identity("decoder", folder)
        peers = {"decoder": PeerConfig(identities[1].certificate)}
        agent = open_agent(settings.agent, f"kvbridge-demo-prefiller-{os.getpid()}", identity=identities[0], peers=peers, serves=True)
        cleanup.callback(agent.close)
        # An emulated device may compile for minutes between an offer and the decoder's claim.
        patient = Bounds(lease=600)
        prefiller = Prefiller(identities[0], peers, device, agent, staging_bytes=STAGING_BYTES, port=settings.port, bounds=patient)
        cleanup.callback(prefiller.close)
        progress("starting the decoder process; both processes load SmolLM2-135M")
        second = SecondProcess(settings.block_sizes[1], settings.decoder_device)
        cleanup.callback(second.end)
        return _Run(settings, prefiller, device, second, identities, progress).result()


class _Run:
    """One demonstration: the model, its cache in pages, and the two ends."""

    def __init__(
        self,
        settings: Settings,
        prefiller: Prefiller,
        device: Device,
        second: SecondProcess,
        identities: tuple[Identity, Identity],
        progress: Callable[[str], None],
    ) -> None:
        from bridge.demo.model import load_model
        from bridge.demo.paged import to_pages
        from bridge.demo.text import default_prompt

        self._settings, self._prefiller, self._device, self._second = settings, prefiller, device, second
        self._identities, self._progress = identities, progress
        self._model = load_model(lambda step, seconds: progress(f"prefiller process: {step}"), threads=THREADS)
        self._tokens = self._model.tokenise(settings.prompt if settings.prompt is not None else default_prompt())
        total = len(self._tokens) + settings.count
        if total > self._model.context:
            raise BadPrompt(
                f"{len(self._tokens)} prompt tokens and {settings.count} decoded ones exceed the model's context of {self._model.context}",
                remedy="give a shorter prompt, or decode fewer tokens",
            )
        progress(f"prefilling {len(self._tokens)} tokens")
        prefilled = self._model.prefill(self._tokens)
        self._first = prefilled.first_token
        self._cache, self._table = to_pages(
            prefilled.layers, block_size=settings.block_sizes[0], element=Element.BF16, layout="NHD", seed=1
        )

    def _local(self, layers: list[Any]) -> list[int]:
        """What decoding here gives from this cache."""
        return self._model.decode(layers, self._first, self._settings.count).tokens

    def result(self) -> Demonstration:
        """Runs every codec. Raises SecondProcessFailed and others."""
        from bridge.demo.paged import from_pages

        settings, count = self._settings, len(self._tokens)
        self._progress("decoding locally without a hand-off")
        unquantised = self._local(from_pages(self._cache, self._table, count))
        self._progress("waiting for the decoder process")
        self._second.answer()
        here, there = self._identities
        self._second.order(
            "open",
            name="decoder",
            certificate=str(there.certificate),
            private_key=str(there.private_key),
            peer="prefiller",
            peer_certificate=str(here.certificate),
            host="127.0.0.1",
            port=self._prefiller.port,
            staging_bytes=STAGING_BYTES,
            agent=settings.agent,
        )
        rows: list[Row] = []
        answer: dict[str, Any] = {}
        for codec in settings.codecs:
            row, answer = self._codec(codec, unquantised)
            rows.append(row)
        self._second.order("close")
        return Demonstration(
            model=self._model.name,
            prompt_tokens=count,
            prompt_end=self._model.text(self._tokens[-16:]),
            continuation=self._model.text([self._first, *rows[0].tokens]),
            layers=self._model.geometry.layers,
            block_sizes=settings.block_sizes,
            mode=settings.mode,
            device=f"{self._device.name} ({self._device.probe()}), decoder: {self._settings.decoder_device}",
            transports=answer["transports"],
            processes=(os.getpid(), self._second.pid),
            rows=tuple(rows),
            left_over=self._prefiller.staging()[0] + answer["staging"],
        )

    def _codec(self, codec: str, unquantised: list[int]) -> tuple[Row, dict[str, Any]]:
        from bridge.demo.paged import through_codec
        from bridge.model import manifest_for

        settings, count = self._settings, len(self._tokens)
        expected = unquantised
        if codec != "raw":
            self._progress(f"{codec}: decoding locally through the reference codec")
            expected = self._local(through_codec(self._cache, self._table, count, codec))
        manifest = manifest_for(
            self._model.geometry,
            codec,
            self._tokens,
            f"demo-{codec}",
            model=self._model.digest,
            lease=0,
            chunk_tokens=128,
            element=Element.BF16,
        )
        # The first crossing compiles kernels and opens connections; the second is the one that is shown.
        self._cross(manifest, 0)
        self._progress(f"{codec}: hand-off of {count} tokens, then {settings.count} tokens are decoded there")
        offer, answer = self._cross(manifest, settings.count)
        if settings.keep is not None:
            _write_container(settings.keep / f"{codec}.kvb", offer.manifest, self._cache, self._table, self._device)
        row = Row(
            codec=codec,
            nbytes=answer["nbytes"],
            bf16_bytes=count * self._model.geometry.token_elements * 2,
            pack=offer.pack_seconds,
            transfer=answer["transfer"],
            land=answer["land"],
            total=answer["total"],
            tokens=answer["tokens"],
            expected=expected,
            unquantised=unquantised,
        )
        return row, answer

    def _cross(self, manifest: Manifest, decoded: int) -> tuple[Offer, dict[str, Any]]:
        """One hand-off, after which the second process decodes so many tokens."""
        count, mode = len(self._tokens), Mode(self._settings.mode)
        offer = self._prefiller.offer(manifest, self._cache, self._table, mode=mode)

        def advance() -> None:
            with contextlib.suppress(KVBridgeError):  # `wait` raises what ended it
                offer.advance(count)

        packing = threading.Thread(target=advance, daemon=True)
        packing.start()
        if mode is Mode.PARK:
            packing.join()
        answer = self._second.order("fetch", ticket=offer.ticket.to_dict(), tokens=count, first_token=self._first, count=decoded)
        packing.join()
        offer.wait(30)
        return offer, answer


def _write_container(path: Path, manifest: Any, cache: Any, table: Any, device: Any) -> None:
    """Packs the same payload into a .kvb file, under a key of its own."""
    import numpy as np

    from bridge.shares import chunk_share
    from bridge.wire import PayloadMap, TagKeys, new_key, write_container

    key, payload = new_key(), PayloadMap(manifest)
    data = np.empty(payload.payload_bytes, np.uint8)
    for index in range(payload.chunk_count):
        chunk = payload.chunk(index)
        part = data[chunk.offset : chunk.offset + chunk.nbytes]
        device.pack(cache, table, chunk_share(manifest, chunk, cache).shares, TagKeys(key, manifest.lease, manifest.generation), part)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_container(file, manifest, key, data.data)
