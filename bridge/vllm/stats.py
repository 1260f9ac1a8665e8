"""The connector's counters on their way through vLLM: from workers to the log line and to Prometheus."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NAME = re.compile(r"(?:(prefiller|decoder|agent)_)?([^{]+)(?:\{(.*)\})?", re.DOTALL)
GAUGE = "staging_bytes"


@dataclass
class BridgeStats(KVConnectorStats):
    """What has changed since the last report, added up over ranks. `data`: name -> difference."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: what was added. Gauges' differences would say nothing there."""
        return {name: count for name, count in self.data.items() if labels_of(name)[1] != GAUGE}

    def is_empty(self) -> bool:
        return not self.data


def labels_of(name: str) -> tuple[str, str, str]:
    """(side, event, clause) of a counter's name; "" for none. `decoder_failed{bad_tag}` -> ("decoder", "failed", "bad_tag")."""
    found = _NAME.fullmatch(name)
    if found is None:
        return "", name, ""
    side, event, clause = found.groups()
    return side or "", event, clause or ""


class BridgePromMetrics(KVConnectorPromMetrics):
    """vllm:kvbridge_events (counter by side, event, clause) and vllm:kvbridge_staging_bytes (gauge by side)."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._events = self._counter_cls(
            name="vllm:kvbridge_events",
            documentation="What happened to hand-offs, by side, event and clause; bytes count as events.",
            labelnames=[*labelnames, "side", "event", "clause"],
        )
        self._staging = self._gauge_cls(
            name="vllm:kvbridge_staging_bytes", documentation="Staging memory in use, over all ranks.", labelnames=[*labelnames, "side"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        own = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for name, change in transfer_stats_data.items():
            side, event, clause = labels_of(name)
            if event == GAUGE:
                self._staging.labels(*own, side).inc(change)
            else:
                self._events.labels(*own, side, event, clause).inc(change)
