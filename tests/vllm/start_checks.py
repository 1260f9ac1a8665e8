"""Runs in vLLM's environment: what the connector refuses of an engine's settings, and what its log line counts. Prints one JSON object."""

import json
import os
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bridge.errors import KVBridgeError
from bridge.handoff import Ticket
from bridge.vllm import params
from bridge.vllm.engine import check_engine
from bridge.vllm.scheduler import SchedulerSide
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


def scheduled(params: dict, token_ids: list[int]) -> list[object]:
    """What the scheduler's side makes of a request, as an engine's steps ask for it: [fetched tokens, the load's error]."""
    config = SimpleNamespace(request_codec=True)
    transfer = SimpleNamespace(engine_id="e", is_kv_producer=True)
    engine = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    side = SchedulerSide(config, engine, 1)
    request = SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        prompt_token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        lora_request=None,
        mm_features=[],
        cache_salt=None,
    )
    side.new_request(request)
    count, _ = side.matched_tokens(request, 0)
    side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([0],)), count)
    loads = side._orders.loads
    return [count, loads[0].error if loads else "", bool(side._prefills)]


def main() -> None:
    ticket = params.for_decoder(Ticket("prefill-0", "r", 7, 1), 1, 3, "engine")
    stats = BridgeStats(data={"prefiller_offered": 1, "prefiller_staging_bytes": -2777088, "decoder_staging_bytes": 4096})
    found = {
        "alone": refusal(),
        "pipeline": refusal(pipeline_parallel_size=2),
        "data": refusal(data_parallel_size_local=2),
        "data, each engine by itself": refusal(data_parallel_size_local=2, data_parallel_external_lb=True),
        "log line": stats.reduce(),
        "fetch": scheduled(ticket, [1, 2, 3]),
        "fetch of no tokens": scheduled(ticket, [1, -2, 3]),
        "prefill": scheduled({"do_remote_decode": True}, [1, 2, 3]),
        "prefill of no tokens": scheduled({"do_remote_decode": True}, [1, 1 << 32, 3]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
