"""Runs in vLLM's environment: what the connector refuses of an engine's settings, and what its log line counts. Prints one JSON object."""

import json
import os
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bridge.errors import KVBridgeError
from bridge.vllm.engine import check_engine
from bridge.vllm.stats import BridgeStats

ALONE = {
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "data_parallel_size_local": 1,
    "data_parallel_external_lb": False,
}


def refusal(**settings: object) -> str:
    engine = SimpleNamespace(parallel_config=SimpleNamespace(**{**ALONE, **settings}), speculative_config=None)
    try:
        check_engine(engine, SimpleNamespace(kv_cache_groups=[]))
    except KVBridgeError as error:
        return str(error)
    return ""


def main() -> None:
    stats = BridgeStats(data={"prefiller_offered": 1, "prefiller_staging_bytes": -2777088, "decoder_staging_bytes": 4096})
    found = {
        "alone": refusal(),
        "pipeline": refusal(pipeline_parallel_size=2),
        "data": refusal(data_parallel_size_local=2),
        "data, each engine by itself": refusal(data_parallel_size_local=2, data_parallel_external_lb=True),
        "log line": stats.reduce(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
