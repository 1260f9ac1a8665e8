"""A prefiller and a decoder, booted once for each configuration and kept until another one is asked for. Never more than two at a time."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from bridge.handoff import create_identity
from tests.vllm.engine import Engine, Finished, free_ports
from tests.vllm.models import sensitive_model

NAMES = {"prefiller": "prefill-0", "decoder": "decode-0"}
BOUNDS = {"connect": 30, "claim": 30, "chunk": 30, "transfer": 30, "staging": 30, "lease": 60, "heartbeat": 0.5, "silence": 30}
"""Nothing that goes well takes so long. A death is noticed by its connection; `Pair.run_out` has a lease's time pass."""
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
OVERLAY = "KVBRIDGE_VLLM_SETTINGS"
"""More of LLM's arguments, as JSON, for engines on other machines than CI's: docs/ci.md has those for one NVIDIA card."""
CONNECTOR = {"kv_connector": "BridgeConnector", "kv_connector_module_path": "bridge.vllm.connector"}


class Rig:
    """See the module."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvbridge-vllm-"))
        for name in NAMES.values():
            create_identity(name, self.folder)
        self.port = free_ports(4)
        self._engines: dict[str, Engine] = {}
        self.boots: list[tuple[str, float]] = []

    def settings(self, role: str, *, extra: dict[str, Any] | None = None, connector: dict[str, Any] | None = None, **engine: Any) -> Any:
        """LLM's arguments. extra: for kv_connector_extra_config. connector: for kv_transfer_config. engine: all else."""
        name, other = NAMES[role], NAMES["decoder" if role == "prefiller" else "prefiller"]
        config = {
            "name": name,
            "certificate": str(self.folder / f"{name}.crt"),
            "private_key": str(self.folder / f"{name}.key"),
            "port": self.port if role == "prefiller" else 0,
            "peers": {other: {"certificate": str(self.folder / f"{other}.crt"), "host": "127.0.0.1", "port": self.port}},
            "chunk_tokens": 128,
            "staging_bytes": 64 << 20,
            "bounds": BOUNDS,
            **(extra or {}),
        }
        transfer = {
            **CONNECTOR,
            "kv_role": "kv_producer" if role == "prefiller" else "kv_consumer",
            "engine_id": name,
            "kv_connector_extra_config": config,
            **(connector or {}),
        }
        return {
            "model": str(sensitive_model()),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 1024,
            "block_size": 32 if role == "prefiller" else 128,
            "kv_cache_memory_bytes": 48 << 20,
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "worker_extension_cls": "tests.vllm.hooks.Hooks",
            "kv_transfer_config": transfer,
            **json.loads(os.environ.get(OVERLAY, "{}")),
            **engine,
        }

    def engine(self, role: str, settings: dict[str, Any]) -> Engine:
        """The running engine of this role if it has these settings; otherwise a new one, begun but perhaps not ready."""
        now = self._engines.get(role)
        if now is not None and now.settings == settings and now.alive:
            return now
        if now is not None:
            now.close()
        self._engines[role] = Engine(settings, self.folder / f"{role}.log")
        return self._engines[role]

    def pair(self, prefiller: dict[str, Any] | None = None, decoder: dict[str, Any] | None = None) -> Pair:
        """Both engines, ready, with hooks undone. prefiller, decoder: arguments of `settings`."""
        start = time.monotonic()
        engines = [self.engine(role, self.settings(role, **(more or {}))) for role, more in zip(NAMES, (prefiller, decoder), strict=True)]
        for engine in engines:
            engine.wait_ready()
            engine.rpc("calm")
        engines[0].rpc("run_out")  # what an earlier test has left on offer
        if time.monotonic() - start > 3:
            self.boots.append((f"{prefiller} {decoder}", time.monotonic() - start))
        return Pair(*engines)

    def close(self, keep: bool = False) -> None:
        """keep: what the engines said; private keys are gone in any case."""
        for engine in self._engines.values():
            engine.close()
        for key in self.folder.glob("*.key"):
            key.unlink()
        if keep:
            print(f"\nthe engines' logs are in {self.folder}")
        else:
            shutil.rmtree(self.folder)


class Pair:
    """A prefiller and a decoder that work together."""

    def __init__(self, prefiller: Engine, decoder: Engine) -> None:
        self.prefiller, self.decoder = prefiller, decoder

    def prefill(self, prompt: list[int], codec: str | None = None, **more: Any) -> Finished:
        return self.prefiller.generate(prompt, 1, offer(codec), **more)

    def handed_off(self, prompt: list[int], tokens: int = 16, codec: str | None = None, **more: Any) -> Finished:
        """Prefilled there, decoded here from pages that hold poison until they are written."""
        params = self.prefill(prompt, codec).params
        self.decoder.rpc("poison")
        return self.decoder.generate(prompt, tokens, params, **more)

    def local(self, prompt: list[int], tokens: int = 16, **more: Any) -> Finished:
        """The decoder alone, from poisoned pages."""
        self.decoder.rpc("poison")
        return self.decoder.generate(prompt, tokens, **more)

    def oracle(self, prompt: list[int], codec: str, dump: Path, tokens: int = 16) -> Finished:
        """Decoded from what the reference codec leaves of the KV that was dumped, written by plain indexing."""
        self.decoder.rpc("oracle", str(dump), codec)
        self.decoder.rpc("poison")
        try:
            return self.decoder.generate(prompt, tokens, ticket_params("oracle"))
        finally:
            self.decoder.rpc("calm")

    def dump(self, prompt: list[int], folder: Path) -> None:
        """Prefills, writes the KV to a file, and has the payload thrown away."""
        self.prefiller.rpc("watch")
        params = self.prefill(prompt).params
        self.prefiller.rpc("dump", str(folder))
        self.decline(prompt, params)

    def decline(self, prompt: list[int], params: Any) -> None:
        """What a router does with a ticket that it does not need any more: a request at the decoder that ends before it begins."""
        self.decoder.order("pause")
        self.decoder.abort(self.decoder.add(prompt, 1, params))
        self.decoder.order("resume")

    def run_out(self) -> None:
        """The time of every lease on offer has passed."""
        self.prefiller.rpc("run_out")

    def assert_empty(self) -> None:
        self.prefiller.assert_empty()
        self.decoder.assert_empty()


def offer(codec: str | None = None) -> dict[str, Any]:
    """What a router sends to the prefiller."""
    return {**OFFER, "kvbridge": {"codec": codec}} if codec else dict(OFFER)


def ticket_params(request_id: str = "nobody", lease: int = 1, **own: Any) -> dict[str, Any]:
    """Well-formed parameters for the decoder with a ticket that no prefiller gave."""
    ticket = {"peer": "prefill-0", "request_id": request_id, "lease": f"{lease:016x}", "generation": 1, "rank": 0}
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvbridge": {"ticket": ticket, "tp_size": 1, "tokens": 5, **own}}


def largest_difference(one: Finished, other: Finished) -> float:
    """Of the log-probabilities."""
    return max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)


def agreeing(one: Finished, other: Finished) -> int:
    """Leading tokens that are equal."""
    same = 0
    for a, b in zip(one.tokens, other.tokens, strict=False):
        if a != b:
            break
        same += 1
    return same
