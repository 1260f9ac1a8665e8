"""Methods that tests call in vLLM's workers: look at the connector, poison pages, kill or hinder it at a step, and be the oracle.

The oracle writes what the reference codec leaves of a prefiller's KV straight into the decoder's pages, by plain indexing and with its own
knowledge of vLLM's CPU layout: no wire, no tags, no staging, no device of kvbridge. Decoding from it is what a hand-off has to equal.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.codecs import declared, reference
from bridge.devices import PlansLandings
from bridge.pages import element_of
from bridge.transfer.errors import TransferFailed


class _Done:
    """A fetch that has happened."""

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        return

    def result(self, timeout: float | None = None) -> None:
        return


class Hooks:
    """Mixed into vLLM's worker class (worker_extension_cls)."""

    def kvb_worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return getattr(get_kv_transfer_group(), "_worker", None)

    def kvb_counters(self) -> dict[str, int]:
        worker = self.kvb_worker()
        if worker is None:
            return {}
        found = worker.snapshot()
        found["leases"] = worker._prefiller.live_leases() if worker._prefiller else 0
        found["fetching"] = len(worker._fetches)
        found["sending"] = len(worker._sending)
        return found

    def kvb_pid(self) -> int:
        return os.getpid()

    def kvb_tensors(self) -> dict[int, torch.Tensor]:
        """vLLM's own KV tensors [blocks, heads, block size, 2 * dim] by layer."""
        from vllm.model_executor.models.utils import extract_layer_index

        context = self.vllm_config.compilation_config.static_forward_context
        return {extract_layer_index(name): layer.kv_cache for name, layer in context.items() if hasattr(layer, "kv_cache")}

    def kvb_poison(self, value: float = 1e3) -> None:
        """Every page of every layer. Finite, since attention multiplies masked positions by zero."""
        for tensor in self.kvb_tensors().values():
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
                tensor.view(torch.uint8).fill_(0x70)
            else:
                tensor.fill_(value)

    def kvb_pages(self) -> list[str]:
        """A digest of each page's bytes in all layers, by page."""
        tensors = [tensor.contiguous().view(torch.uint8).flatten(1).cpu().numpy() for tensor in self.kvb_tensors().values()]
        return [hashlib.sha256(b"".join(tensor[page].tobytes() for tensor in tensors)).hexdigest() for page in range(len(tensors[0]))]

    def kvb_run_out(self) -> None:
        """The time of every lease has passed, as if nobody had been heard of for so long."""
        worker = self.kvb_worker()
        if worker is None or worker._prefiller is None:
            return
        leases = worker._prefiller._leases
        with leases.lock:
            for lease in leases._live.values():
                lease.deadline = 0.0

    # What happens at a step of the hand-off.

    def kvb_at(self, side: str, step: str, action: str, number: int = 0, seconds: float = 0.0) -> None:
        """At the `number`-th (from 0) `step` that the side ("prefiller" or "decoder") reports from now on: kill, sleep, or sleep_always."""
        seen = [0]
        self._kvb_steps: list[tuple[str, Any]] = []

        def observed(reporting: str, name: str, details: dict[str, Any]) -> None:
            if reporting != side:
                return
            self._kvb_steps.append((name, details.get("chunk")))
            if name != step:
                return
            seen[0] += 1
            if seen[0] - 1 == number or action == "sleep_always":
                if action == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(seconds)

        self.kvb_worker().observed = observed

    def kvb_steps(self) -> list[tuple[str, Any]]:
        return list(getattr(self, "_kvb_steps", ()))

    def kvb_calm(self) -> None:
        """Undoes kvb_at, kvb_break and kvb_oracle."""
        worker = self.kvb_worker()
        if worker is None:
            return
        worker.__dict__.pop("observed", None)
        for part in (worker._prefiller, worker._decoder):
            if part is not None:
                for what in ("pack", "land", "landing"):
                    part.device.__dict__.pop(what, None)
        if worker._decoder is not None:
            worker._decoder.__dict__.pop("start", None)

    def kvb_break(self, what: str, only_rank: int = -1) -> None:
        """From now on the device's `what` ("pack" or "land") raises, on one TP rank or on all."""
        worker = self.kvb_worker()
        if only_rank not in (-1, worker._rank):
            return
        part = worker._prefiller if what == "pack" else worker._decoder
        if part is not None:

            def broken(*arguments: Any, **more: Any) -> None:
                raise TransferFailed("this device was broken by a test")

            # A device that plans its landings is never asked to land.
            setattr(part.device, "landing" if what == "land" and isinstance(part.device, PlansLandings) else what, broken)

    # The oracle.

    def kvb_watch(self) -> None:
        """Remembers the blocks of the request that was packed last."""
        worker = self.kvb_worker()
        if "save" in worker.__dict__:
            return
        original = worker.save

        def save(orders: Any) -> None:
            if orders.saves:
                last = orders.saves[-1]
                self._kvb_saved = (last.block_ids, last.total)
            original(orders)

        worker.save = save

    def kvb_dump(self, folder: str) -> int:
        """Writes K and V of the request packed last, fp32 [heads, tokens, dim] by layer, as they lie in this rank's pages."""
        worker = self.kvb_worker()
        blocks, tokens = self._kvb_saved
        found = {}
        for index, tensor in self.kvb_tensors().items():
            key, value = self._kvb_views(tensor)
            number, group = next((number, group) for number, group in enumerate(worker._groups) if index in group.layers)
            page, position = _places(blocks[number], tokens, group.block_size, tensor.shape[2], 0)
            found[f"k{index}"] = _take(key, page, position).float().cpu().numpy()
            found[f"v{index}"] = _take(value, page, position).float().cpu().numpy()
            found["element"] = np.array(str(key.dtype))
        np.savez(Path(folder) / f"rank{worker._rank}.npz", **found)
        return tokens

    def kvb_oracle(self, folder: str, codec: str) -> None:
        """From now on a fetch copies what `codec` leaves of the dumped KV (of a prefiller with one rank) into the request's pages."""
        worker = self.kvb_worker()

        def start(ticket: Any, target: Any) -> _Done:
            found = np.load(Path(folder) / "rank0.npz")
            source = element_of(torch.empty(0, dtype=getattr(torch, str(found["element"]).removeprefix("torch."))))
            first, count = worker._heads
            for index, tensor in self.kvb_tensors().items():
                sides = zip("kv", self._kvb_views(tensor), strict=True)
                slots = declared(codec).for_layer(tensor.shape[3] // 2, source)
                for (name, view), coding in zip(sides, (slots.key, slots.value), strict=True):
                    plain = found[f"{name}{index}"][first : first + count, target.first_token : target.end_token]
                    decoded = reference.decode(*reference.encode(plain, coding, 1.0), coding, plain.shape[-1], 1.0)
                    table = next(group.table for group in target.cache if index in group.cache.layers)
                    pages, position = table.locate(target.first_token, target.end_token, tensor.shape[0])
                    _put(view, torch.from_numpy(pages), torch.from_numpy(position), torch.from_numpy(np.array(decoded)))
            return _Done()

        worker._decoder.start = start

    def _kvb_views(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as [blocks, block size, heads, dim], or in tiles of [blocks, n, block size / n, heads, dim / m, m]."""
        if tensor.dtype is torch.uint8:  # vLLM's type for fp8 caches
            tensor = tensor.view(torch.float8_e4m3fn)
        blocks, heads, size, twice = tensor.shape
        if tensor.device.type != "cpu":
            key, value = tensor.permute(0, 2, 1, 3).split(twice // 2, dim=3)
            return key, value
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        dim, flat = twice // 2, tensor.reshape(blocks, heads, -1)
        isa = _get_attn_isa(self.model_config.dtype, size, dim, self.cache_config.cache_dtype)
        key, value = flat[..., : size * dim], flat[..., size * dim :]
        if isa == "amx":
            # K [token / 16][dim / 2][token % 16][dim % 2], V [dim / 16][token / 2][dim % 16][token % 2]
            k = key.view(blocks, heads, size // 16, dim // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
            v = value.view(blocks, heads, dim // 16, size // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
            return k, v
        return key.view(blocks, heads, dim, size).permute(0, 3, 1, 2), value.view(blocks, heads, size, dim).permute(0, 2, 1, 3)


def _places(blocks: Any, tokens: int, block_size: int, kernel_size: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts, token = block_size // kernel_size, torch.arange(first, tokens)
    pages = torch.tensor([block * parts + part for block in blocks for part in range(parts)])
    return pages[token // kernel_size], token % kernel_size


def _tiled(view: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return position // view.shape[2], position % view.shape[2]


def _take(view: torch.Tensor, page: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, dim]"""
    page, position = page.to(view.device), position.to(view.device)
    held = view.view(torch.uint8) if view.dtype is torch.float8_e4m3fn else view
    found = held[page, position] if held.dim() == 4 else held[(page, *_tiled(held, position))].flatten(2)
    return found.view(view.dtype).transpose(0, 1)


def _put(view: torch.Tensor, page: torch.Tensor, position: torch.Tensor, vectors: torch.Tensor) -> None:
    page, position, vectors = (given.to(view.device) for given in (page, position, vectors.transpose(0, 1)))
    if view.dtype is torch.float8_e4m3fn:
        # torch saturates to NaN, caches to the largest number; and it has no indexed writes of this type.
        vectors, view = vectors.clamp(-448, 448).to(view.dtype).view(torch.uint8), view.view(torch.uint8)
    vectors = vectors.to(view.dtype)
    if view.dim() == 4:
        view[page, position] = vectors
    else:
        view[(page, *_tiled(view, position))] = vectors.unflatten(2, view.shape[4:])
