"""The connector's scheduler side: reads requests' parameters, keeps count of what was ordered, and names leases."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from bridge.errors import KVBridgeError
from bridge.handoff.ticket import Ticket
from bridge.vllm import params
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.content import Adapters, content_of
from bridge.vllm.engine import hashes_images
from bridge.vllm.errors import BadParameters
from bridge.vllm.orders import Content, Failure, Load, Save, StepOrders
from bridge.vllm.params import DecodeOrder, PrefillOrder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbridge")

_GOOD_ENDS = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)


class _Prefill:
    """A request that is prefilled here for a decoder elsewhere."""

    def __init__(self, request: Request, order: PrefillOrder, content: Content) -> None:
        self.total = request.num_prompt_tokens
        self.wire_id = params.wire_id(request.request_id)
        self.lease = (secrets.randbits(64), 1)
        self.content = content
        self.codec = order.codec or ""


class SchedulerSide:
    """State of the connector in the engine's scheduler. Nothing that a request carries is believed before it is parsed."""

    def __init__(self, config: ConnectorConfig, vllm_config: VllmConfig, groups: int) -> None:
        self._config = config
        self._adapters = Adapters(config.compare_weights == "whole")
        self._hashes_images = hashes_images(vllm_config)
        # Before a fetch of everything vLLM gives up the first token of a window, which computing the last prompt token anew still reads.
        self._recomputed = 1 if groups > 1 else 0
        self._engine_id = vllm_config.kv_transfer_config.engine_id or ""
        self._produces = vllm_config.kv_transfer_config.is_kv_producer
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._manager: KVCacheManager | None = None
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, DecodeOrder | KVBridgeError] = {}
        self._sending: set[str] = set()
        self._orders = StepOrders()

    def bind(self, manager: KVCacheManager) -> None:
        """Called once, before the first step."""
        self._manager = manager

    def new_request(self, request: Request) -> None:
        """Parses the request's parameters; what is wrong with them fails this request alone, later and in words."""
        if request.lora_request is not None:
            self._adapters.used(request.lora_request)
        try:
            order = params.parse(request.kv_transfer_params)
            if isinstance(order, PrefillOrder) and not self._produces:
                raise BadParameters(
                    "this engine hands nothing off", remedy="send prefills to an engine whose kv_role is kv_producer or kv_both"
                )
            if isinstance(order, PrefillOrder) and order.codec and not self._config.request_codec:
                raise BadParameters("requests may not choose a codec here", remedy="leave it out, or set request_codec")
            if isinstance(order, PrefillOrder):
                self._prefills[request.request_id] = _Prefill(request, order, content_of(request, self._adapters, self._hashes_images))
        except KVBridgeError as error:
            wants_fetch = isinstance(request.kv_transfer_params, dict) and request.kv_transfer_params.get("do_remote_prefill")
            logger.warning("request %s: %s", request.request_id, error)
            if wants_fetch:
                self._decodes[request.request_id] = error
            else:
                self._orders.refused.append(error.clause)
            return
        if isinstance(order, DecodeOrder):
            self._decodes[request.request_id] = order

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many tokens beyond `computed` will be fetched: the rest of the prompt, once a request."""
        if request.request_id not in self._decodes:
            return 0, False
        count = request.num_prompt_tokens - self._recomputed - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Blocks were allocated for a fetch, or the whole prompt is here already and nobody will fetch it."""
        order = self._decodes.pop(request.request_id, None)
        if order is None:
            return
        error = Failure.of(order) if isinstance(order, KVBridgeError) else None
        good = order if isinstance(order, DecodeOrder) else None
        content: Content = ()
        try:
            content = content_of(request, self._adapters, self._hashes_images)
        except KVBridgeError as bad:  # token ids that no tokenizer gives, an adapter whose files are not here
            good, error = None, error or Failure.of(bad)
        if external > 0:
            end = request.num_prompt_tokens - self._recomputed
            load = Load(
                request.request_id,
                good,
                error,
                tuple(tuple(group) for group in blocks.get_block_ids()),
                end - external,
                end,
                content,
            )
            self._orders.loads.append(load)
        elif good is not None:
            self._orders.declined.append(good)

    def step(self, output: SchedulerOutput) -> StepOrders:
        """The orders of this step; resets them."""
        if self._prefills and self._manager is not None:
            computed = {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
            cached = output.scheduled_cached_reqs
            computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            for request_id in self._prefills.keys() & computed.keys():
                prefill = self._prefills[request_id]
                done = min(computed[request_id] + output.num_scheduled_tokens[request_id], prefill.total)
                blocks = tuple(tuple(group) for group in self._manager.get_block_ids(request_id))
                save = Save(request_id, prefill.wire_id, prefill.lease, blocks, done, prefill.total, prefill.content, prefill.codec)
                self._orders.saves.append(save)
        orders, self._orders = self._orders, StepOrders()
        return orders

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """(whether the worker still needs the blocks, what the router is to pass on)."""
        request_id = request.request_id
        unused = self._decodes.pop(request_id, None)
        if isinstance(unused, DecodeOrder):
            self._orders.declined.append(unused)
        prefill = self._prefills.pop(request_id, None)
        if prefill is None:
            return False, None
        if request.status not in _GOOD_ENDS or request.num_computed_tokens < prefill.total or self._adapter_changed(request):
            self._orders.cancelled.append(request_id)
            return False, None
        self._sending.add(request_id)
        ticket = Ticket(self._config.identity.name, prefill.wire_id, *prefill.lease)
        return True, params.for_decoder(ticket, self._tp_size, prefill.total, self._engine_id)

    def _adapter_changed(self, request: Request) -> bool:
        """Whether the files of its adapter are others than when the request came: vLLM may have loaded these, or those."""
        if request.lora_request is None:
            return False
        try:
            self._adapters.of(request.lora_request)
        except KVBridgeError as error:
            logger.warning("request %s: %s", request.request_id, error)
            self._orders.refused.append(error.clause)
            return True
        return False

    def heard(self, output: KVConnectorOutput) -> None:
        """What the workers have finished."""
        self._sending -= output.finished_sending or set()

    def busy(self) -> bool:
        """Whether workers have something to report that only a step brings here."""
        return bool(self._sending or self._orders.cancelled or self._orders.declined)
