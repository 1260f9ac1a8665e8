"""What a prompt's KV depends on besides the model, as digests: each side computes them from its own request, and they must be equal."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.model import GeometryError, adapter_digest, adapter_files
from bridge.vllm.engine import on_this_host
from bridge.vllm.errors import AdapterUnknown
from bridge.vllm.orders import Content
from bridge.wire import ContentKind, token_digest

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request

_REMEMBERED = 1024

Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """Digests of LoRA adapters, read again only where a file has changed. whole: of every byte."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._known: dict[str, tuple[Stamp, bytes]] = {}

    def digest(self, name: str, path: str) -> bytes:
        """Of the adapter that vLLM finds at `path`. Raises AdapterUnknown."""
        try:
            folder = on_this_host(path)
            if folder is None:
                raise AdapterUnknown(f"the files of the adapter {name[:100]!r} were not found on this host, so they cannot be compared")
            stamp = _stamp(folder)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                if len(self._known) >= _REMEMBERED:
                    self._known.clear()
                known = self._known[path] = stamp, adapter_digest(folder, whole=self._whole)
        except GeometryError as error:
            raise AdapterUnknown(f"the adapter {name[:100]!r} cannot be compared: {error.detail}") from None
        except (OSError, RuntimeError, ValueError) as error:  # a file that goes meanwhile, a home folder or a name that there is not
            raise AdapterUnknown(f"the adapter {name[:100]!r} cannot be compared: {str(error)[:200]}") from None
        return known[1]


def _stamp(folder: Path) -> Stamp:
    """What changes when a file is written or replaced. Raises BadWeights."""
    found = [(file, file.stat()) for file in adapter_files(folder)]
    return tuple((str(file), state.st_ino, state.st_size, state.st_mtime_ns) for file, state in found)


def content_of(request: Request, adapters: Adapters) -> Content:
    """Raises BadContent for ids that no tokenizer gives, and AdapterUnknown."""
    found = [(ContentKind.TOKENS, token_digest(list(request.prompt_token_ids or [])))]
    if request.lora_request is not None:
        found.append((ContentKind.LORA, adapters.digest(request.lora_request.lora_name, request.lora_request.lora_path)))
    if request.mm_features:
        found.append((ContentKind.MULTIMODAL, _digest(*(str(feature.identifier) for feature in request.mm_features))))
    if request.prompt_embeds is not None:
        found.append((ContentKind.PROMPT_EMBEDDINGS, _embeddings(request.prompt_embeds, request.prompt_is_token_ids)))
    if request.cache_salt:
        found.append((ContentKind.CACHE_SALT, _digest(request.cache_salt)))
    return tuple(found)


def _digest(*texts: str) -> bytes:
    # Texts come from clients, whose JSON may hold lone surrogates.
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).digest()


def _embeddings(embeddings: torch.Tensor, are_tokens: list[bool] | None) -> bytes:
    """Of the vectors, bit for bit, and of which positions are tokens instead."""
    import torch

    about = f"{embeddings.dtype} {tuple(embeddings.shape)} {''.join('01'[bool(one)] for one in are_tokens or [])}"
    data = embeddings.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(about.encode() + b"\0" + data.tobytes()).digest()
