"""The connector's worker side: packs what the engine has computed, fetches what it is to decode from, and reports each request once."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bridge import __version__
from bridge.counters import Counters
from bridge.devices import Device, open_device
from bridge.errors import KVBridgeError
from bridge.handoff import Decoder, Fetch, Mode, Offer, Prefiller, Target, tls
from bridge.handoff.errors import Cancelled, StagingFull
from bridge.model import manifest_for
from bridge.pages import PagedCache
from bridge.sharding import Holding, plan
from bridge.transfer.agent import Agent
from bridge.transfer.choose import open_agent
from bridge.vllm import engine, kv_tensors
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.engine_pages import BlockGroup, EnginePages
from bridge.vllm.errors import BadParameters, CannotLoad, traceback_of
from bridge.vllm.orders import Load, Save, StepOrders
from bridge.vllm.params import DecodeOrder
from bridge.wire import Manifest, PayloadMap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kvbridge")

_QUIET_SECONDS = 60


class _Sending:
    """A prefill on its way into staging memory. The engine's blocks are free when `done`."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.save: Save | None = None
        self.failed = False
        self.wanted = 0
        """Bytes for which staging memory had no room; 0 where that is not known."""
        self.holding: threading.Thread | None = None

    @property
    def held(self) -> bool:
        """Whether the payload passes through a ring, straight from the engine's blocks, once the request has finished."""
        return self.offer is not None and self.offer.mode is Mode.STREAM

    @property
    def done(self) -> bool:
        if self.failed:
            return True
        if self.holding is not None:
            return not self.holding.is_alive()
        return self.offer is not None and self.offer.packed


@dataclass(frozen=True)
class _Source:
    """One of the prefiller's ranks, and what this rank takes from it as the reader number `reader` of `readers`."""

    rank: int
    part: Holding
    reader: int
    readers: int


class WorkerSide:
    """State of the connector in one worker of the engine (one TP rank)."""

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, groups: tuple[BlockGroup, ...], rank: int) -> None:
        self._groups = groups
        self._config, self._vllm_config, self._rank = config, vllm_config, rank
        self._geometry, self._model = engine.geometry(vllm_config), b""
        self._layout = engine.layout(self._geometry, vllm_config.parallel_config.tensor_parallel_size)
        self._heads = self._layout.holding(rank).heads
        # What a lossy codec left may enter a prefix cache, where other requests find it, only with the operator's consent.
        self._lossless = bool(vllm_config.cache_config.enable_prefix_caching) and not config.lossy_prefix_cache
        self.counters = Counters()
        self._pages: EnginePages | None = None
        self._agent: Agent | None = None
        self._prefiller: Prefiller | None = None
        self._decoder: Decoder | None = None
        self._sending: dict[str, _Sending] = {}
        self._finished: set[str] = set()
        self._fetches: dict[str, list[Fetch]] = {}
        self._failed_loads: dict[str, str] = {}
        self._plans: dict[int, list[_Source]] = {}
        self._told: dict[str, float] = {}

    # Start-up.

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describes the engine's pages and opens staging, agent and control channel. Raises ConnectorError, HandoffError and others."""
        self._pages = EnginePages(kv_tensors.describe_all(kv_caches, self._vllm_config, self._heads[0]), self._groups)
        # Only now: a model that is named by a hub is downloaded when vLLM loads it.
        whole = self._config.compare_weights == "whole"
        if whole:
            logger.info("kvbridge reads the model's weights once, to compare every byte of them with the other engines'")
        self._model = engine.digest(self._vllm_config, whole)
        logger.info("kvbridge opens its device and its agent; for CPUs it compiles first, some 20 s")
        device = self._open_device()
        transfer = self._vllm_config.kv_transfer_config
        self._agent = self._open_agent(transfer.is_kv_producer)
        if transfer.is_kv_producer and self._rank in self._layout.first_replicas():
            self._prefiller = Prefiller(
                self._config.identity,
                self._config.peers,
                device,
                self._agent,
                staging_bytes=self._config.staging_bytes,
                staging=self._config.staging,
                host=self._config.listen,
                port=self._config.port + self._rank if self._config.port else 0,
                bounds=self._config.bounds,
                observe=lambda step, details: self.observed("prefiller", step, details),
            )
        if transfer.is_kv_consumer:
            self._decoder = Decoder(
                self._config.identity,
                self._config.peers,
                device,
                self._agent,
                staging_bytes=self._config.staging_bytes,
                staging=self._config.staging,
                bounds=self._config.bounds,
                observe=lambda step, details: self.observed("decoder", step, details),
            )
        logger.info("%s", self._described(device))

    def _described(self, device: Device) -> str:
        """One line for the log: who this is, and how it can be reached."""
        config, ends = self._config, [end for end in (self._prefiller, self._decoder) if end is not None]
        at = f", listens on {config.listen}:{self._prefiller.port}" if self._prefiller is not None else ""
        staged = " and ".join(sorted({place for end in ends for place in end.staged_in()}))
        return (
            f"kvbridge {__version__}: {config.identity.name}, rank {self._rank}{at}; agent {config.agent}, device {device.name}, "
            f"staging in {staged or 'no'} memory; peers {', '.join(config.peers)}"
        )

    def _open_agent(self, serves: bool) -> Agent:
        config = self._config
        return open_agent(
            config.agent,
            f"{config.identity.name}-{self._rank}",
            identity=config.identity,
            peers=config.peers,
            serves=serves,
            host=config.listen,
            port=config.data_port + self._rank if config.data_port else 0,
            transports=config.transports,
            minimum_gbps=config.minimum_gbps,
            refuse_slow_links=config.refuse_slow_links,
        )

    def observed(self, side: str, step: str, details: dict[str, Any]) -> None:
        """Each step of a hand-off, from the thread that takes it."""
        logger.debug("%s: %s %s", side, step, details)
        if step == "refused" and details["reason"] != tls.ENDED and self._due(step):
            logger.warning(
                "kvbridge refused a connection from %s to its control port (%s); if it was a decoder, its certificate must stand"
                " under peers here, and this engine's under peers there. More of them are only counted for %d s",
                details["address"],
                details["reason"],
                _QUIET_SECONDS,
            )
        if step == "expired" and not details["claimed"] and self._due(step):
            logger.warning(
                "kvbridge: no decoder asked for the KV of request %r before its lease ran out; see to it that the router passes this"
                " engine's kv_transfer_params on to a decoder in time. More of them are only counted for %d s",
                details["request_id"],
                _QUIET_SECONDS,
            )

    def _due(self, what: str) -> bool:
        """Whether a warning of this kind is due again."""
        now = time.monotonic()
        if now < self._told.get(what, -math.inf) + _QUIET_SECONDS:
            return False
        self._told[what] = now
        return True

    def _open_device(self) -> Device:
        from vllm.platforms import current_platform

        return open_device(self._config.device or current_platform.device_type)

    # Each step.

    def cancel(self, orders: StepOrders) -> None:
        """Revokes the leases of prefills that ended early. Nothing of them is being packed: only steps pack, and what has finished."""
        for request_id in orders.cancelled:
            sending = self._sending.pop(request_id, None)
            if sending is not None and sending.offer is not None:
                sending.offer.cancel()

    def save(self, orders: StepOrders) -> None:
        """Packs every chunk that this step completed; returns when the bytes are in staging memory."""
        if self._rank == 0:
            for clause in orders.refused:
                self.counters.add("send_failed", clause)
        for save in orders.saves:
            sending = self._sending.setdefault(save.request_id, _Sending())
            sending.save = save
            if sending.failed or self._prefiller is None:
                sending.failed = True
                continue
            try:
                if sending.offer is None:
                    sending.offer = self._park_or_hold(sending, save)
                if sending.offer is not None and not sending.held:
                    sending.offer.advance(save.computed, self._registered().tables(save.block_ids))
            except Exception as error:
                self._fail(sending, save.request_id, error)

    def _park_or_hold(self, sending: _Sending, save: Save) -> Offer | None:
        """An offer with room for the whole payload. Where staging has none, None until the last token, then one that passes through a ring.

        The second kind holds the engine's blocks. It is offered before the engine answers the router, so no decoder can ask too early.
        """
        if self._free_staging() >= sending.wanted:
            try:
                return self._offer(save, Mode.PARK)
            except StagingFull:
                # Asked for again only where there may be room: each refusal is counted, and one for a request is enough.
                sending.wanted = PayloadMap(self._manifest(save)).payload_bytes
        if save.computed < save.total:
            return None
        offer = self._offer(save, Mode.STREAM)
        self.counters.add("held")
        return offer

    def _free_staging(self) -> int:
        used, budget = self._prefiller.staging() if self._prefiller is not None else (0, 0)
        return budget - used

    def _fail(self, sending: _Sending, request_id: str, error: Exception) -> None:
        """Only this request fails; the engine goes on."""
        sending.failed = True
        if sending.offer is not None:
            sending.offer.cancel(f"the prefiller could not pack it: {error}")
        self.counters.add("send_failed", getattr(error, "clause", "internal"))
        logger.warning("request %s cannot be handed off: %s", request_id, error, exc_info=traceback_of(error))

    def _offer(self, save: Save, mode: Mode) -> Offer:
        if self._prefiller is None:
            raise engine.UnsupportedEngine("this engine has no prefiller role")
        groups = self._registered().located(save.block_ids, self._heads)
        return self._prefiller.offer(self._manifest(save), groups, mode=mode, lease=save.lease)

    def _manifest(self, save: Save) -> Manifest:
        cache = self._registered().cache
        per_layer: Mapping[int, str] = {} if save.codec else self._config.codec_by_layer
        manifest = manifest_for(
            self._geometry,
            save.codec or self._config.codec,
            [0] * save.total,
            save.wire_id,
            model=self._model,
            lease=0,
            chunk_tokens=self._config.chunk_tokens,
            per_layer=per_layer,
            element=cache.element(),
            layers=sorted(cache.layers),
            heads=self._heads,
            shard=self._layout.shard(self._rank),
            scales=self._scales(cache, save.codec),
        )
        return replace(manifest, content=save.content)

    def _scales(self, cache: PagedCache, codec: str) -> dict[int, tuple[float, float]]:
        """The engine's own scales where its fp8 travels as it is."""
        found = {}
        for index, pages in cache.layers.items():
            key, value = pages.sides
            name = codec or self._config.codec_by_layer.get(index, self._config.codec)
            if value is not None and (key.scale, value.scale) != (1.0, 1.0) and name in ("raw", "fp8_e4m3"):
                found[index] = (key.scale, value.scale)
        return found

    def _registered(self) -> EnginePages:
        if self._pages is None:
            raise engine.UnsupportedEngine("the engine has not registered its cache")
        return self._pages

    def load(self, orders: StepOrders) -> None:
        """Starts fetches; returns at once."""
        for order in orders.declined:
            self._decline(order)
        for load in orders.loads:
            try:
                self._fetches[load.request_id] = self._start(load)
            except Exception as error:
                self._failed_loads[load.request_id] = str(error)
                self._load_failed(load.request_id, error)

    def _load_failed(self, request_id: str, error: Exception) -> None:
        self.counters.add("load_failed", getattr(error, "clause", "internal"))
        logger.warning("request %s was not received: %s", request_id, error, exc_info=traceback_of(error))

    def _decline(self, order: DecodeOrder) -> None:
        if self._decoder is None:
            return
        try:
            sources = self._sources(order)
        except KVBridgeError:
            return  # no prefiller is divided like this, so none waits
        for source in sources:
            self._decoder.decline(replace(order.ticket, rank=source.rank), self._model, "the decoder does not need this payload")

    def _start(self, load: Load) -> list[Fetch]:
        if load.error is not None:
            raise CannotLoad(load.error.clause, load.error.detail, load.error.advice)
        if load.order is None:
            raise BadParameters("there is no ticket")
        if self._decoder is None:
            raise engine.UnsupportedEngine("this engine has no decoder role", remedy="set kv_role to kv_consumer or kv_both")
        wanted = []
        for source in self._sources(load.order):
            target = Target(
                self._registered().located(load.block_ids, source.part.heads),
                None,
                self._model,
                first_token=load.first_token,
                end_token=load.end_token,
                content=load.content,
                reader=source.reader,
                readers=source.readers,
                lossless=self._lossless,
            )
            wanted.append((replace(load.order.ticket, rank=source.rank), target))
        # Started only when all of them can be: one that nobody knew of would write into blocks that the engine has given to others.
        return [self._decoder.start(ticket, target) for ticket, target in wanted]

    def _sources(self, order: DecodeOrder) -> list[_Source]:
        """What this rank takes from which of the prefiller's ranks. Raises UnsupportedEngine where the prefiller cannot be split so."""
        found = self._plans.get(order.tp_size)
        if found is None:
            theirs = engine.layout(self._geometry, order.tp_size)
            made = plan(theirs, self._layout, theirs.first_replicas())
            found = [_Source(read.source, read.part, *made.reader(read.source, self._rank)) for read in made.reads[self._rank]]
            self._plans[order.tp_size] = found
        return found

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
        for request_id, fetches in list(self._fetches.items()):
            error = _first_error(fetches)
            if not all(fetch.done() for fetch in fetches):
                if error is not None:
                    # What came from one of the prefiller's ranks is of no use without the others.
                    for fetch in fetches:
                        fetch.cancel()
                continue
            del self._fetches[request_id]
            received.add(request_id)
            if error is not None:
                failed.add(request_id)
                self._load_failed(request_id, error)
        return sent, received | failed, failed

    def _is_sent(self, request_id: str) -> bool:
        """Whether a finished prefill's blocks may be freed; begins to hold what found staging full."""
        sending = self._sending[request_id]
        if not sending.done and sending.holding is None and sending.save is not None:
            sending.holding = threading.Thread(target=self._hold, args=(sending, sending.save), daemon=True)
            sending.holding.start()
        return sending.done

    def _hold(self, sending: _Sending, save: Save) -> None:
        """Serves a payload chunk by chunk straight from the engine's blocks, as its decoder takes them.

        Staging is used only once a decoder is there: payloads that wait for theirs would keep it from those that have one.
        """
        try:
            if sending.offer is not None:
                sending.offer.wait_claimed()
                sending.offer.advance(save.total, self._registered().tables(save.block_ids))
        except Exception as error:
            self._fail(sending, save.request_id, error)

    def snapshot(self) -> dict[str, int]:
        """Every counter of this rank."""
        found = dict(self.counters.snapshot())
        for side, part in (("prefiller", self._prefiller), ("decoder", self._decoder)):
            if part is not None:
                found.update({f"{side}_{name}": count for name, count in part.counters.snapshot().items()})
                found[f"{side}_staging_bytes"] = part.staging()[0]
        if self._agent is not None:
            found.update({f"agent_refused{{{what}}}": count for what, count in self._agent.turned_away().items()})
        return found

    def close(self) -> None:
        """Ends every hand-off; the agent, which both ends use, is closed last."""
        with contextlib.ExitStack() as stack:
            for part in (self._agent, self._decoder, self._prefiller):
                if part is not None:
                    stack.callback(part.close)


def _first_error(fetches: list[Fetch]) -> Exception | None:
    """What ended those that failed; rather the cause than a cancellation that followed from it."""
    found: Exception | None = None
    for fetch in fetches:
        if fetch.done():
            try:
                fetch.result(0)
            except Exception as error:
                if found is None or isinstance(found, Cancelled):
                    found = error
    return found
