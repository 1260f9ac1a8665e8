"""The connector's worker side: packs what the engine has computed, fetches what it is to decode from, and reports each request once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from bridge.counters import Counters
from bridge.devices import Device, open_device
from bridge.errors import KVBridgeError
from bridge.geometry import manifest_for
from bridge.handoff import Decoder, Fetch, Mode, Offer, Prefiller, Target
from bridge.handoff.errors import StagingFull
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.transfer.nixl import NixlAgent
from bridge.vllm import engine
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.orders import Load, Save, StepOrders
from bridge.vllm.params import DecodeOrder
from bridge.wire import Manifest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvbridge")


class _Sending:
    """A prefill on its way into staging memory. The engine's blocks are free when `done`."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.save: Save | None = None
        self.failed = False
        self.holding: threading.Thread | None = None

    @property
    def done(self) -> bool:
        if self.failed:
            return True
        if self.holding is not None:
            return not self.holding.is_alive()
        return self.offer is not None and self.offer.packed


class WorkerSide:
    """State of the connector in one worker of the engine (one TP rank)."""

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, rank: int) -> None:
        self._config, self._vllm_config, self._rank = config, vllm_config, rank
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._geometry, self._model = engine.geometry_and_digest(vllm_config)
        self._heads = engine.head_range(self._geometry.kv_heads, self._tp_size, rank)
        self._block_size = vllm_config.cache_config.block_size
        self.counters = Counters()
        self._cache: PagedCache | None = None
        self._kernel_blocks = 1
        self._agent: NixlAgent | None = None
        self._prefiller: Prefiller | None = None
        self._decoder: Decoder | None = None
        self._sending: dict[str, _Sending] = {}
        self._finished: set[str] = set()
        self._fetches: dict[str, list[Fetch]] = {}
        self._failed_loads: dict[str, str] = {}

    # Start-up.

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describes the engine's pages and opens staging, agent and control channel. Raises ConnectorError, HandoffError and others."""
        self._cache = engine.describe_all(kv_caches, self._vllm_config, self._heads[0])
        kernel_size = next(iter(self._cache.layers.values())).sides[0].block_size
        if self._block_size % kernel_size:
            raise engine.UnsupportedEngine(f"blocks of {self._block_size} tokens in kernel blocks of {kernel_size}")
        self._kernel_blocks = self._block_size // kernel_size
        device = self._open_device()
        transfer = self._vllm_config.kv_transfer_config
        self._agent = NixlAgent(
            f"{self._config.identity.name}-{self._rank}", transports=self._config.transports, serves=transfer.is_kv_producer
        )
        if transfer.is_kv_producer and engine.holds_first_replica(self._geometry.kv_heads, self._tp_size, self._rank):
            self._prefiller = Prefiller(
                self._config.identity,
                self._config.peers,
                device,
                self._agent,
                staging_bytes=self._config.staging_bytes,
                host=self._config.listen,
                port=self._config.port + self._rank if self._config.port else 0,
                bounds=self._config.bounds,
            )
        if transfer.is_kv_consumer:
            self._decoder = Decoder(
                self._config.identity,
                self._config.peers,
                device,
                self._agent,
                staging_bytes=self._config.staging_bytes,
                bounds=self._config.bounds,
            )

    def _open_device(self) -> Device:
        from vllm.platforms import current_platform

        return open_device(self._config.device or current_platform.device_type)

    # Each step.

    def cancel(self, orders: StepOrders) -> None:
        """Prefills that ended early: their leases are revoked before their blocks are used again."""
        for request_id in orders.cancelled:
            sending = self._sending.pop(request_id, None)
            if sending is not None and sending.offer is not None:
                sending.offer.cancel()

    def save(self, orders: StepOrders) -> None:
        """Packs every chunk that this step completed; returns when the bytes are in staging memory."""
        for save in orders.saves:
            sending = self._sending.setdefault(save.request_id, _Sending())
            sending.save = save
            if sending.failed or self._prefiller is None:
                sending.failed = True
                continue
            try:
                if sending.offer is None:
                    sending.offer = self._offer(save, Mode.PARK)
                sending.offer.advance(save.computed, self._table(save.block_ids))
            except StagingFull:
                # Not lost: the blocks stay until a decoder asks, then pass through a ring.
                self.counters.add("held")
            except KVBridgeError as error:
                self._fail(sending, save.request_id, error)

    def _fail(self, sending: _Sending, request_id: str, error: KVBridgeError) -> None:
        sending.failed = True
        self.counters.add("send_failed", error.clause)
        logger.warning("request %s cannot be handed off: %s", request_id, error)

    def _offer(self, save: Save, mode: Mode) -> Offer:
        if self._prefiller is None or self._cache is None:
            raise engine.UnsupportedEngine("this engine has no prefiller role")
        return self._prefiller.offer(self._manifest(save), self._cache, self._table(save.block_ids), mode=mode, lease=save.lease)

    def _manifest(self, save: Save) -> Manifest:
        if self._cache is None:
            raise engine.UnsupportedEngine("the engine has not registered its cache")
        layers = self._cache.layers
        per_layer: Mapping[int, str] = {} if save.codec else self._config.codec_by_layer
        manifest = manifest_for(
            self._geometry,
            save.codec or self._config.codec,
            [0] * save.total,
            save.request_id,
            model=self._model,
            lease=0,
            chunk_tokens=self._config.chunk_tokens,
            per_layer=per_layer,
            element=self._cache.element(),
            layers=sorted(layers),
            heads=self._heads,
            scales=self._scales(save.codec),
        )
        return replace(manifest, content=save.content)

    def _scales(self, codec: str) -> dict[int, tuple[float, float]]:
        """The engine's own scales where its fp8 travels as it is."""
        found = {}
        for index, pages in (self._cache.layers if self._cache else {}).items():
            key, value = pages.sides
            name = codec or self._config.codec_by_layer.get(index, self._config.codec)
            if value is not None and (key.scale, value.scale) != (1.0, 1.0) and name in ("raw", "fp8_e4m3"):
                found[index] = (key.scale, value.scale)
        return found

    def _table(self, block_ids: tuple[int, ...]) -> BlockTable:
        """The engine's blocks, cut into the blocks of its kernels where those are smaller."""
        parts = self._kernel_blocks
        pages = block_ids if parts == 1 else [block * parts + part for block in block_ids for part in range(parts)]
        return BlockTable(pages, self._block_size // parts)

    def load(self, orders: StepOrders) -> None:
        """Starts fetches; returns at once."""
        for order in orders.declined:
            if self._decoder is not None:
                for rank in range(order.tp_size):
                    if self._overlap(order, rank) is not None:
                        self._decoder.decline(replace(order.ticket, rank=rank), self._model, "the decoder has these tokens already")
        for load in orders.loads:
            try:
                self._fetches[load.request_id] = self._start(load)
            except KVBridgeError as error:
                self._failed_loads[load.request_id] = str(error)
                self.counters.add("load_failed", error.clause)

    def _start(self, load: Load) -> list[Fetch]:
        if load.order is None:
            raise engine.UnsupportedEngine(load.error, remedy="")
        if self._decoder is None or self._cache is None:
            raise engine.UnsupportedEngine("this engine has no decoder role", remedy="set kv_role to kv_consumer or kv_both")
        fetches = []
        for rank in range(load.order.tp_size):
            overlap = self._overlap(load.order, rank)
            if overlap is None:
                continue
            first, count, reader, readers = overlap
            target = Target(
                self._part(first, count),
                self._table(load.block_ids),
                self._model,
                first_token=load.first_token,
                end_token=load.end_token,
                content=load.content,
                reader=reader,
                readers=readers,
            )
            fetches.append(self._decoder.start(replace(load.order.ticket, rank=rank), target))
        return fetches

    def _overlap(self, order: DecodeOrder, rank: int) -> tuple[int, int, int, int] | None:
        """(first head, heads, reader, readers) of what this rank takes from the prefiller's rank, None for nothing."""
        total = self._geometry.kv_heads
        if not engine.holds_first_replica(total, order.tp_size, rank):
            return None
        theirs = engine.head_range(total, order.tp_size, rank)
        takers = [r for r in range(self._tp_size) if _meeting(theirs, engine.head_range(total, self._tp_size, r))]
        mine = _meeting(theirs, self._heads)
        return (*mine, takers.index(self._rank), len(takers)) if mine else None

    def _part(self, first: int, count: int) -> PagedCache:
        """The pages of some of this rank's heads."""
        if self._cache is None:
            raise engine.UnsupportedEngine("the engine has not registered its cache")
        start = first - self._heads[0]
        if (start, count) == (0, self._heads[1]):
            return self._cache
        return PagedCache({index: _some_heads(pages, start, count) for index, pages in self._cache.layers.items()}, first)

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed to receive): each id once. finished: requests that ended since the last step."""
        for request_id in finished:
            for fetch in self._fetches.get(request_id, ()):
                fetch.cancel()
            if request_id in self._sending:
                self._finished.add(request_id)
        sent = {request_id for request_id in self._finished if self._is_sent(request_id)}
        for request_id in sent:
            self._finished.discard(request_id)
            del self._sending[request_id]
        received, failed = set(), set(self._failed_loads)
        self._failed_loads.clear()
        for request_id in [r for r, fetches in self._fetches.items() if all(fetch.done() for fetch in fetches)]:
            try:
                for fetch in self._fetches[request_id]:
                    fetch.result(0)
            except KVBridgeError as error:
                failed.add(request_id)
                self.counters.add("load_failed", error.clause)
                logger.warning("request %s was not received: %s", request_id, error)
            del self._fetches[request_id]
            received.add(request_id)
        for request_id in failed:
            # What one rank could not fetch, its others need not go on with.
            for fetch in self._fetches.get(request_id, ()):
                fetch.cancel()
        return sent, received | failed, failed

    def _is_sent(self, request_id: str) -> bool:
        """Whether a finished prefill's blocks may be freed; begins to hold what found staging full."""
        sending = self._sending[request_id]
        if not sending.done and sending.holding is None and sending.save is not None:
            sending.holding = threading.Thread(target=self._hold, args=(sending, sending.save), daemon=True)
            sending.holding.start()
        return sending.done

    def _hold(self, sending: _Sending, save: Save) -> None:
        """Serves a payload chunk by chunk straight from the engine's blocks, as its decoder takes them."""
        try:
            if sending.offer is None:
                sending.offer = self._offer(save, Mode.STREAM)
            sending.offer.advance(save.total, self._table(save.block_ids))
        except KVBridgeError as error:
            self._fail(sending, save.request_id, error)

    def snapshot(self) -> dict[str, int]:
        """Every counter of this rank."""
        found = dict(self.counters.snapshot())
        for side, part in (("prefiller", self._prefiller), ("decoder", self._decoder)):
            if part is not None:
                found.update({f"{side}_{name}": count for name, count in part.counters.snapshot().items()})
                found[f"{side}_staging_bytes"] = part.staging()[0]
        return found

    def close(self) -> None:
        for part in (self._prefiller, self._decoder, self._agent):
            if part is not None:
                part.close()


def _meeting(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int] | None:
    """(first, count) of what two ranges of heads share."""
    first, end = max(a[0], b[0]), min(a[0] + a[1], b[0] + b[1])
    return (first, end - first) if first < end else None


def _some_heads(pages: object, start: int, count: int) -> LayerPages:
    if not isinstance(pages, LayerPages) or pages.value is None:
        raise engine.UnsupportedEngine("only pages of floats can be divided by heads")
    axis = 3 if pages.key.dim() == 6 else 2
    key, value = (side.narrow(axis, start, count) for side in (pages.key, pages.value))
    return LayerPages(key, value, pages.key_scale, pages.value_scale)
