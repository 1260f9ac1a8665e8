"""vLLM's view of the bridge: a KV connector that is loaded by kv_connector_module_path.

    --kv-transfer-config '{"kv_connector": "BridgeConnector", "kv_connector_module_path": "bridge.vllm.connector",
                           "kv_role": "kv_producer", "kv_connector_extra_config": {...}}'

docs/vllm.md describes kv_connector_extra_config. This class only hands vLLM's calls to the scheduler's and the worker's side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from bridge.vllm import engine
from bridge.vllm.config import ConnectorConfig
from bridge.vllm.orders import StepOrders
from bridge.vllm.scheduler import SchedulerSide
from bridge.vllm.stats import BridgePromMetrics, BridgeStats
from bridge.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.kv_cache_interface import KVCacheConfig


class BridgeConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Raises ConnectorError at start-up, with one sentence, where configuration or engine do not fit."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        engine.check_api()
        super().__init__(vllm_config, role, kv_cache_config)
        engine.check_engine(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        config = ConnectorConfig.parse(transfer.kv_connector_extra_config)
        config.check_role(transfer.is_kv_producer, transfer.is_kv_consumer)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._reported: dict[str, int] = {}
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(config, vllm_config, len(kv_cache_config.kv_cache_groups))
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            if hasattr(torch.cpu, "_init_amx"):
                # A decoder's first forward may be one token, and vLLM's AMX attention then runs before anyone asked for permission.
                torch.cpu._init_amx()
            self._worker = WorkerSide(config, vllm_config, engine.page_groups(kv_cache_config), get_tensor_model_parallel_rank())

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        # What a preempted request packed stays right: the same tokens give the same KV. Later chunks come from its new blocks.
        return

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            orders = self._orders()
            self._worker.cancel(orders)
            self._worker.load(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._orders())

    def _orders(self) -> StepOrders:
        orders = self._connector_metadata
        return orders if isinstance(orders, StepOrders) else StepOrders()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            return KVConnectorTransferResults()
        sent, received, failed = self._worker.results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is None:
            return None
        now = self._worker.snapshot()
        fresh = {name: count - self._reported.get(name, 0) for name, count in now.items() if count != self._reported.get(name, 0)}
        self._reported = now
        return BridgeStats(data=fresh) if fresh else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return BridgeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics:
        return BridgePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # Scheduler.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens) if self._scheduler is not None else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        return self._scheduler.step(scheduler_output) if self._scheduler is not None else StepOrders()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request) if self._scheduler is not None else (False, None)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request) if self._scheduler is not None else (False, None)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.heard(connector_output)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.busy()
