"""What a prompt's KV depends on besides the model, as digests: each side computes them from its own request, and they must be equal."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.model import GeometryError, adapter_digest, adapter_files
from bridge.vllm.checkpoint import on_this_host
from bridge.vllm.errors import AdapterUnknown, UnsupportedEngine
from bridge.wire import ContentKind, token_digest
from bridge.wire.errors import BadContent

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from bridge.vllm.orders import Content

_REMEMBERED = 1024
MAX_ADAPTERS = 65_536
"""That an engine may use in its life: the first digest of none of them is forgotten."""

_SETTLED_SECONDS = 2.0
"""A file that was changed so shortly ago may be changed again without another time of change: file systems count in ticks."""

_CHANGED = b""
"""In place of a digest: equal to none. What is loaded is not known."""

_COUNTED = re.compile(r"renderer\d+-mm-\d+-\w+-\d+")
"""vLLM's identifiers of images that it does not hash."""

_VECTORS = "send a dense tensor of shape (tokens, hidden size)"

Stamp = tuple[tuple[str, int, int, int, int, int], ...]


class Adapters:
    """Digests of LoRA adapters, read again only where a file has changed. whole: of every byte.

    vLLM computes with what it has loaded. It reads the files again only for another lora_int_id, for load_inplace, and when an adapter
    comes back that it had evicted; and its prefix cache knows an adapter by its name and path alone. So the files say what an engine
    computes with only as long as they stay what they were when it first used them.
    """

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._known: dict[str, tuple[Stamp, bytes]] = {}
        self._loaded: dict[int, bytes] = {}
        self._cached: dict[tuple[str, str], bytes] = {}

    def of(self, request: LoRARequest) -> bytes:
        """Of the adapter that vLLM computes this request with. Raises AdapterUnknown, also where its files are not those first used."""
        name, path = request.lora_name, request.lora_path
        places: tuple[tuple[dict[Any, bytes], Any], ...] = (self._loaded, request.lora_int_id), (self._cached, (name, path))
        if request.load_inplace and request.lora_int_id in self._loaded:
            self._loaded[request.lora_int_id] = _CHANGED  # also where the new files cannot be compared
        if any(key not in first and len(first) >= MAX_ADAPTERS for first, key in places):
            raise AdapterUnknown(f"this engine has used {MAX_ADAPTERS} adapters, and no more are compared", remedy="restart it")
        try:
            now = self.digest(name, path)
        except AdapterUnknown:
            # vLLM loads it all the same where it can, a moment later, or has loaded what was there before; a hub's name it downloads first.
            local = os.path.expanduser(path)
            if os.path.isabs(local) or os.path.lexists(local):
                for first, key in places:
                    first.setdefault(key, _CHANGED)
            raise
        if request.is_3d_lora_weight:
            # The same tensors, taken in another order.
            now = hashlib.sha256(b"3d\0" + now).digest()
        if request.load_inplace:
            self._loaded[request.lora_int_id] = now
        if any(first.setdefault(key, now) != now for first, key in places):
            # For good: nobody knows which of the two is loaded, and the prefix cache has this request's KV now.
            for first, key in places:
                first[key] = _CHANGED
            raise AdapterUnknown(
                f"the files of the adapter {name[:100]!r} have changed since this engine first used it, or could not be compared then, "
                "or another was loaded in its place",
                remedy="load it under a new name, or restart the engine",
            )
        return now

    def used(self, request: LoRARequest) -> None:
        """A request that may not be handed off uses an adapter: vLLM loads it now, if it has not."""
        try:
            self.of(request)
        except AdapterUnknown:
            return

    def digest(self, name: str, path: str) -> bytes:
        """Of the adapter that is at `path` now. Raises AdapterUnknown."""
        try:
            folder = on_this_host(path)
            if folder is None:
                raise AdapterUnknown(f"the files of the adapter {name[:100]!r} were not found on this host, so they cannot be compared")
            looked, stamp = time.time(), _stamp(folder)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            found = adapter_digest(folder, whole=self._whole)
            if stamp != _stamp(folder):
                raise AdapterUnknown(
                    f"the files of the adapter {name[:100]!r} change while they are read", remedy="let them be written first"
                )
        except GeometryError as error:
            advice = None if error.advice == type(error).remedy else error.advice  # its own, not that about models
            raise AdapterUnknown(f"the adapter {name[:100]!r} cannot be compared: {error.detail}", remedy=advice) from None
        except (OSError, RuntimeError, ValueError) as error:  # a file that goes meanwhile, a home folder or a name that there is not
            raise AdapterUnknown(f"the adapter {name[:100]!r} cannot be compared: {str(error)[:200]}") from None
        # At the time when it was looked at: reading it may have taken longer than that.
        if abs(looked - max(changed for *_, changed in stamp) / 1e9) > _SETTLED_SECONDS:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[path] = stamp, found
        return found


def _stamp(folder: Path) -> Stamp:
    """What changes when a file is written or replaced: its time of change too, which no program can set. Raises BadWeights."""
    found = [(file, file.stat()) for file in adapter_files(folder)]
    return tuple((str(file), state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for file, state in found)


def content_of(request: Request, adapters: Adapters, images_are_hashed: bool = True) -> Content:
    """images_are_hashed: bridge.vllm.engine.hashes_images of this engine.

    Raises BadContent for ids that no tokenizer gives and for embeddings that are none, AdapterUnknown, and UnsupportedEngine for images
    that this engine does not hash.
    """
    found = [(ContentKind.TOKENS, token_digest(list(request.prompt_token_ids or [])))]
    if request.lora_request is not None:
        found.append((ContentKind.LORA, adapters.of(request.lora_request)))
    if request.mm_features:
        identifiers = [str(feature.identifier) for feature in request.mm_features]
        # With LoRA in the model's image encoder the adapter's name stands before it.
        if not images_are_hashed or any(_COUNTED.fullmatch(identifier.rpartition(":")[2]) for identifier in identifiers):
            raise UnsupportedEngine(
                "this engine does not hash images, so those of two prompts cannot be compared",
                remedy="leave mm_processor_cache_gb or prefix caching on",
            )
        found.append((ContentKind.MULTIMODAL, _digest(identifiers)))
    if request.prompt_embeds is not None:
        found.append((ContentKind.PROMPT_EMBEDDINGS, _embeddings(request.prompt_embeds, request.prompt_is_token_ids)))
    if request.cache_salt:
        found.append((ContentKind.CACHE_SALT, _digest([request.cache_salt])))
    return tuple(found)


def _digest(texts: list[str]) -> bytes:
    """Of texts from clients, whose JSON may hold lone surrogates and zeros: each after its length, so that no two lists are alike."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.digest()


def _embeddings(embeddings: torch.Tensor, are_tokens: list[bool] | None) -> bytes:
    """Of the vectors, bit for bit, and of which positions are tokens instead. Raises BadContent."""
    import torch

    about = f"{embeddings.dtype} {tuple(embeddings.shape)} {''.join('01'[bool(one)] for one in are_tokens or [])}"
    if not (embeddings.layout is torch.strided and embeddings.dtype.is_floating_point and embeddings.dim() and not embeddings.is_meta):
        raise BadContent(f"the prompt embeddings are no vectors of floating-point numbers: {about[:100]}", remedy=_VECTORS)
    try:
        data = embeddings.detach().resolve_neg().cpu().contiguous().view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise BadContent(f"the prompt embeddings cannot be read: {str(error)[:200]}", remedy=_VECTORS) from None
    return hashlib.sha256(about.encode() + b"\0" + data.tobytes()).digest()
