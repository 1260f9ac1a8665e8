"""Runs in vLLM's environment: what the connector refuses of an engine's settings, and what its log line counts. Prints one JSON object."""

import json
import logging
import math
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bridge.errors import KVBridgeError
from bridge.handoff import Ticket
from bridge.vllm import params
from bridge.vllm.content import Adapters, content_of
from bridge.vllm.engine import check_engine, digest
from bridge.vllm.scheduler import SchedulerSide
from bridge.vllm.stats import BridgeStats
from bridge.vllm.worker import WorkerSide

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


def made(**fields: object) -> SimpleNamespace:
    """A request of vLLM's, as far as the connector looks at it."""
    nothing = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "prompt_is_token_ids": None, "cache_salt": None}
    return SimpleNamespace(request_id="r", **{**nothing, **fields})


def embedded(seed: int, mask: list[bool], dtype: torch.dtype = torch.float32) -> list[str]:
    """The digests of a prompt that is part tokens, part embeddings."""
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    request = made(prompt_token_ids=[1, 2, 3], prompt_embeds=vectors, prompt_is_token_ids=mask)
    return [digest.hex() for _, digest in content_of(request, Adapters(False))]


def overridden(folder: str, **overrides: object) -> str:
    """The digest of an engine's model, with --hf-overrides."""
    (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    config = SimpleNamespace(to_dict=lambda: {"model_type": "llama", "rope_theta": 1e4, **overrides})
    model = SimpleNamespace(model=folder, revision=None, hf_overrides=overrides, hf_config=config)
    engine = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="dummy"))
    return digest(engine, False).hex()


def warnings_of_refusals(count: int) -> list[str]:
    """What the worker's log says of so many connections that were turned away."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("vllm.kvbridge")
    logger.addHandler(handler)
    side = SimpleNamespace(_strangers_told=-math.inf)
    for _ in range(count):
        WorkerSide.observed(side, "prefiller", "refused", {"address": "10.0.0.9", "reason": "self-signed certificate"})
    logger.removeHandler(handler)
    return told


def scheduled(params: dict, token_ids: list[int], **more: object) -> list[object]:
    """What the scheduler's side makes of a request, as an engine's steps ask for it: [fetched tokens, the load's error]."""
    config = SimpleNamespace(request_codec=True, compare_weights="sampled")
    transfer = SimpleNamespace(engine_id="e", is_kv_producer=True)
    engine = SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    side = SchedulerSide(config, engine, 1)
    request = made(prompt_token_ids=token_ids, num_prompt_tokens=len(token_ids), kv_transfer_params=params, **more)
    side.new_request(request)
    count, _ = side.matched_tokens(request, 0)
    side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([0],)), count)
    loads = side._orders.loads
    error = loads[0].error if loads else None
    return [count, f"{error.clause}: {error.detail}" if error else "", bool(side._prefills)]


def main() -> None:
    ticket = params.for_decoder(Ticket("prefill-0", "r", 7, 1), 1, 3, "engine")
    stats = BridgeStats(data={"prefiller_offered": 1, "prefiller_staging_bytes": -2777088, "decoder_staging_bytes": 4096})
    absent = SimpleNamespace(lora_name="tuned", lora_path="/there/is/no/adapter")
    halves = [True, False, True]
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
        "fetch with an adapter that is not here": scheduled(ticket, [1, 2, 3], lora_request=absent),
        "prefill with an adapter that is not here": scheduled({"do_remote_decode": True}, [1, 2, 3], lora_request=absent),
        "embeddings": [embedded(1, halves), embedded(1, halves), embedded(2, halves), embedded(1, [True] * 3)],
        "refusals": warnings_of_refusals(3),
        "embeddings of another type": [embedded(1, halves, torch.bfloat16), embedded(1, halves)],
    }
    with tempfile.TemporaryDirectory() as folder:
        found["overrides"] = [overridden(folder), overridden(folder, rope_theta=1e6), overridden(folder, rope_theta=1e6)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
