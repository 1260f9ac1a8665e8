"""The demonstration itself: this process prefills and offers, a second one fetches and decodes, and the tokens are compared."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bridge.demo.errors import BadPrompt, DemoError
from bridge.demo.report import Demonstration, Row

ANSWER_SECONDS = 300.0
_WARM_UP_TOKENS = 0


class SecondProcessFailed(DemoError):
    """The decoder process reported a failure, ended, or did not answer."""

    clause = "second_process"


class SecondProcess:
    """The decoder process: one JSON line each way at a time."""

    def __init__(self, threads: int, block_size: int) -> None:
        command = [sys.executable, "-m", "bridge.demo.decoder_process", str(threads), str(block_size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


def demonstrate(
    codecs: Sequence[str],
    prompt: str | None,
    count: int,
    block_sizes: tuple[int, int],
    mode: str,
    port: int,
    keep: Path | None,
    progress: Callable[[str], None],
) -> Demonstration:
    """See `kvbridge demo --help`. Raises KVBridgeError."""
    # Both processes need the same number for equal sums; with one, two processes on few cores do not wait for each other's threads.
    threads = 1
    progress("starting the decoder process; both processes load SmolLM2-135M")
    second = SecondProcess(threads, block_sizes[1])
    try:
        with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as folder:
            return _demonstrate(second, Path(folder), threads, codecs, prompt, count, block_sizes, mode, port, keep, progress)
    finally:
        second.end()


def _demonstrate(
    second: SecondProcess,
    folder: Path,
    threads: int,
    codecs: Sequence[str],
    prompt: str | None,
    count: int,
    block_sizes: tuple[int, int],
    mode: str,
    port: int,
    keep: Path | None,
    progress: Callable[[str], None],
) -> Demonstration:
    from bridge.demo.model import load_model
    from bridge.demo.paged import from_pages, through_codec, to_pages
    from bridge.demo.text import default_prompt
    from bridge.devices import open_device
    from bridge.geometry import manifest_for
    from bridge.handoff import Mode, PeerConfig, Prefiller, create_identity
    from bridge.transfer.nixl import NixlAgent
    from bridge.wire import Element

    here, there = create_identity("prefiller", folder), create_identity("decoder", folder)
    model = load_model(lambda step, seconds: progress(f"prefiller process: {step}"), threads=threads)
    tokens = model.tokenise(prompt if prompt is not None else default_prompt())
    if len(tokens) + count > model.context:
        raise BadPrompt(f"{len(tokens)} prompt tokens and {count} decoded ones exceed the model's context of {model.context}")
    progress(f"prefilling {len(tokens)} tokens")
    prefilled = model.prefill(tokens)
    cache, table = to_pages(prefilled.layers, block_size=block_sizes[0], element=Element.BF16, layout="NHD", seed=1)
    bf16_bytes = len(tokens) * model.geometry.token_elements * 2

    progress("decoding locally without a hand-off")
    unquantised = model.decode(from_pages(cache, table, len(tokens)), prefilled.first_token, count).tokens
    staging_bytes = 2 * bf16_bytes + (8 << 20)
    agent = NixlAgent(f"kvbridge-demo-prefiller-{os.getpid()}")
    device = open_device("cpu")
    prefiller = Prefiller(here, {"decoder": PeerConfig(there.certificate)}, device, agent, staging_bytes=staging_bytes, port=port)
    rows, transports, decoder_staging = [], "", 0
    try:
        progress("waiting for the decoder process")
        second.answer()
        second.order(
            "open",
            name="decoder",
            certificate=str(there.certificate),
            private_key=str(there.private_key),
            peer="prefiller",
            peer_certificate=str(here.certificate),
            host="127.0.0.1",
            port=prefiller.port,
            staging_bytes=staging_bytes,
        )
        for codec in codecs:
            expected = unquantised
            if codec != "raw":
                progress(f"{codec}: decoding locally through the reference codec")
                quantised = through_codec(cache, table, len(tokens), codec)
                expected = model.decode(quantised, prefilled.first_token, count).tokens
            manifest = manifest_for(
                model.geometry, codec, tokens, f"demo-{codec}", model=model.digest, lease=0, chunk_tokens=128, element=Element.BF16
            )
            # The first crossing compiles kernels and opens connections; the second is the one that is shown.
            for decoded in (_WARM_UP_TOKENS, count):
                if decoded:
                    progress(f"{codec}: hand-off of {len(tokens)} tokens, then {count} tokens are decoded there")
                offer = prefiller.offer(manifest, cache, table, mode=Mode(mode))
                packing = threading.Thread(target=offer.advance, args=(len(tokens),))
                packing.start()
                if Mode(mode) is Mode.PARK:
                    packing.join()
                answer = second.order(
                    "fetch", ticket=offer.ticket.to_dict(), tokens=len(tokens), first_token=prefilled.first_token, count=decoded
                )
                packing.join()
                offer.wait(30)
            if keep is not None:
                _write_container(keep / f"{codec}.kvb", offer.manifest, cache, table, device)
            transports, decoder_staging = answer["transports"], answer["staging"]
            rows.append(
                Row(
                    codec=codec,
                    nbytes=answer["nbytes"],
                    bf16_bytes=bf16_bytes,
                    pack=offer.pack_seconds,
                    transfer=answer["transfer"],
                    land=answer["land"],
                    total=answer["total"],
                    tokens=answer["tokens"],
                    expected=expected,
                    unquantised=unquantised,
                )
            )
        second.order("close")
        return Demonstration(
            model=model.name,
            prompt_tokens=len(tokens),
            prompt_end=model.text(tokens[-16:]),
            continuation=model.text([prefilled.first_token, *rows[0].tokens]),
            layers=model.geometry.layers,
            block_sizes=block_sizes,
            mode=mode,
            device=f"{device.name} ({device.probe()})",
            transports=transports,
            processes=(os.getpid(), second.pid),
            rows=tuple(rows),
            left_over=prefiller.staging()[0] + decoder_staging,
        )
    finally:
        prefiller.close()
        agent.close()


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
