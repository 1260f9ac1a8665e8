"""Runs in vLLM's environment: what the connector refuses of an engine's settings, and what its log line counts. Prints one JSON object."""

import dataclasses
import json
import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import torch
from safetensors.torch import save_file

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.lora.request import LoRARequest
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.v1.request import RequestStatus

from bridge.errors import KVBridgeError
from bridge.handoff import Ticket
from bridge.vllm import params
from bridge.vllm.checkpoint import INDEXED, loaded_weights
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


FOLDERS = [
    (["model.safetensors"], {}),
    (["a.safetensors", "b.safetensors"], {}),
    (["a.safetensors", "b.safetensors"], {"model": ["b.safetensors"]}),
    (["model.safetensors", "consolidated.safetensors"], {}),
    (["model.safetensors", "consolidated.safetensors"], {"model": ["model.safetensors"]}),
    (["consolidated-1.safetensors", "consolidated-2.safetensors"], {"consolidated": ["consolidated-1.safetensors"]}),
    (["a.safetensors", "b.bin", "c.pt"], {}),
]
"""Weight files of a checkpoint, and what each index of them names."""


def chosen(root: str) -> list[list[object]]:
    """For each of FOLDERS and load_format: [which, the files that vLLM loads, those that are compared]."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    found: list[list[object]] = []
    for number, (files, indexes) in enumerate(FOLDERS):
        folder = Path(root) / f"checkpoint-{number}"
        folder.mkdir()
        for name in files:
            (folder / name).touch()
        for kind, names in indexes.items():
            weight_map = {f"w{n}": name for n, name in enumerate(names)}
            (folder / f"{kind}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for load_format in INDEXED:
            try:
                loader = DefaultModelLoader(LoadConfig(load_format=load_format))
                _, theirs, *_ = loader._prepare_weights(str(folder), None, None, True, None)
            except RuntimeError:  # it finds none
                theirs = []
            compared = loaded_weights(folder, load_format)
            found.append([f"{load_format} of {files} {indexes}", sorted(Path(one).name for one in theirs), [one.name for one in compared]])
    return found


def warnings(count: int, step: str, **details: object) -> list[str]:
    """What the worker's log says of a step that so often happens."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("vllm.kvbridge")
    logger.addHandler(handler)
    side = SimpleNamespace(_told={})
    side._due = partial(WorkerSide._due, side)
    for _ in range(count):
        WorkerSide.observed(side, "prefiller", step, details)
    logger.removeHandler(handler)
    return told


def scheduler(multimodal: object = None, caches: bool = True) -> SchedulerSide:
    config = SimpleNamespace(request_codec=True, compare_weights="sampled", identity=SimpleNamespace(name="prefill-0"))
    engine = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id="e", is_kv_producer=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(multimodal_config=multimodal),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
    )
    return SchedulerSide(config, engine, 1)


def replaced_adapter(folder: str) -> list[bool]:
    """Whether a prefill is handed off: after a request that was not, and again once that request's adapter has other files."""
    path, side, found = Path(folder), scheduler(), []
    lora = LoRARequest("tuned", 1, folder)
    asked = (None, {"do_remote_decode": True}, {"do_remote_decode": True})
    for seed, wanted in zip((1, 1, 2), asked, strict=True):
        (path / "adapter_config.json").write_text("{}")
        save_file({"w": torch.full((4, 4), float(seed))}, path / "adapter_model.safetensors")
        side.new_request(made(prompt_token_ids=[1], num_prompt_tokens=1, kv_transfer_params=wanted, lora_request=lora))
        found.append(bool(side._prefills))
        side._prefills.clear()
    side = scheduler()
    for wanted in asked[:2]:
        side.new_request(made(prompt_token_ids=[1], num_prompt_tokens=1, kv_transfer_params=wanted, lora_request=lora))
        save_file({"w": torch.zeros(4, 4)}, path / "adapter_model.safetensors")
    return [*found, bool(side._prefills)]


def replaced_meanwhile(folder: str) -> list[list[object]]:
    """Of a prefill whose adapter is as it was, and of one whose adapter was replaced since it came: [kept, refused, cancelled]."""
    path, found = Path(folder), []
    for seed in (1, 2):
        side, lora = scheduler(), LoRARequest("tuned", 1, folder)
        (path / "adapter_config.json").write_text("{}")
        save_file({"w": torch.ones(4, 4)}, path / "adapter_model.safetensors")
        request = made(prompt_token_ids=[1], num_prompt_tokens=1, kv_transfer_params={"do_remote_decode": True}, lora_request=lora)
        request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 1
        side.new_request(request)
        save_file({"w": torch.full((4, 4), float(seed))}, path / "adapter_model.safetensors")
        kept, _ = side.finished(request)
        found.append([kept, side._orders.refused, side._orders.cancelled])
    return found


def scheduled(params: dict, token_ids: list[int], multimodal: object = None, caches: bool = True, **more: object) -> list[object]:
    """What the scheduler's side makes of a request, as an engine's steps ask for it: [fetched tokens, the load's error]."""
    side = scheduler(multimodal, caches)
    request = made(prompt_token_ids=token_ids, num_prompt_tokens=len(token_ids), kv_transfer_params=params, **more)
    side.new_request(request)
    count, _ = side.matched_tokens(request, 0)
    side.allocated(request, SimpleNamespace(get_block_ids=lambda: ([0],)), count)
    loads = side._orders.loads
    error = loads[0].error if loads else None
    return [count, f"{error.clause}: {error.detail}" if error else "", bool(side._prefills)]


def first_images(processor_kwargs: dict) -> list[str]:
    """The identifier that vLLM gives the first image of an engine without caches, twice: for two images of two engines."""
    found = []
    for _ in range(2):
        renderer = SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
            config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
            _validate_mm_uuids=lambda *_: None,
        )
        items = SimpleNamespace(get_all_counts=lambda: {"image": 1})
        uuids = BaseRenderer._process_mm_uuids(renderer, None, items, {}, "renderer0-mm-1")
        image = {"image": SimpleNamespace(get_all_items_for_hash=lambda: [object()])}
        found += ProcessorInputs([], image, uuids, processor_kwargs).get_mm_hashes("model", "blake3")["image"]
    return found


WRITTEN = [
    {"kv_load_failure_polcy": "fail"},
    {"kv_load_failure_policy": "bogus"},
    {"kv_load_failure_policy": None},
    {"kv_load_failure_policy": "recompute"},
    {"kv_port": "abc"},
    {"kv_port": 5.5},
    {"kv_port": "5"},
    {"kv_port": 5.0},
    {"kv_role": "both"},
    {"kv_role": None},
    {"kv_rank": 0},
    {"engine_id": 5},
    {"engine_id": "\ud800"},
    {"engine_id": None},
    {"kv_buffer_device": None},
    {"enable_permute_local_kv": "true"},
    {"enable_permute_local_kv": "perhaps"},
    {"kv_connector_extra_config": None},
    {},
]
"""Changes of a kv_transfer_config that vLLM takes, and others that it refuses."""


def transfer_config() -> dict[str, object]:
    """What vLLM's own class has, and what it takes: [configuration, whether it does], and [encoding, whether it does]."""
    from pydantic import TypeAdapter, ValidationError
    from vllm.config import kv_transfer

    def takes(text: bytes) -> bool:
        try:
            TypeAdapter(kv_transfer.KVTransferConfig).validate_json(text)
        except ValidationError:
            return False
        return True

    plain = {"kv_connector": "BridgeConnector", "kv_connector_module_path": "bridge.vllm.connector", "kv_role": "kv_both"}
    return {
        "fields": {one.name: str(one.type) for one in dataclasses.fields(kv_transfer.KVTransferConfig)},
        "roles": {
            role: [role in get_args(kv_transfer.KVProducer), role in get_args(kv_transfer.KVConsumer)]
            for role in get_args(kv_transfer.KVRole)
        },
        "taken": [[{**plain, **changed}, takes(json.dumps({**plain, **changed}).encode())] for changed in WRITTEN],
        "encodings": [[encoding, takes(json.dumps(plain).encode(encoding))] for encoding in ("utf-8", "utf-8-sig", "utf-16")],
    }


def main() -> None:
    ticket = params.for_decoder(Ticket("prefill-0", "r", 7, 1), 1, 3, "engine")
    stats = BridgeStats(data={"prefiller_offered": 1, "prefiller_staging_bytes": -2777088, "decoder_staging_bytes": 4096})
    without = {"multimodal": SimpleNamespace(mm_processor_cache_gb=0), "caches": False}
    counted, mixed = first_images({}), first_images({"max_pixels": 64})
    images = [[SimpleNamespace(identifier=one)] for one in (counted[0], mixed[0], "5f" * 32)]
    absent = LoRARequest("tuned", 1, "/there/is/no/adapter")
    halves = [True, False, True]
    found = {
        "alone": refusal(),
        "pipeline": refusal(pipeline_parallel_size=2),
        "data": refusal(data_parallel_size_local=2),
        "data, each engine by itself": refusal(data_parallel_size_local=2, data_parallel_external_lb=True),
        "log line": stats.reduce(),
        "transfer config": transfer_config(),
        "fetch": scheduled(ticket, [1, 2, 3]),
        "fetch of no tokens": scheduled(ticket, [1, -2, 3]),
        "prefill": scheduled({"do_remote_decode": True}, [1, 2, 3]),
        "prefill of no tokens": scheduled({"do_remote_decode": True}, [1, 1 << 32, 3]),
        "fetch with an adapter that is not here": scheduled(ticket, [1, 2, 3], lora_request=absent),
        "prefill with an adapter that is not here": scheduled({"do_remote_decode": True}, [1, 2, 3], lora_request=absent),
        "images that are counted": [counted, scheduled(ticket, [1, 2, 3], mm_features=images[0])],
        "images that are counted, and hashed": [
            mixed,
            scheduled(ticket, [1, 2, 3], **without, mm_features=images[1]),
        ],
        "images that are hashed": scheduled(ticket, [1, 2, 3], mm_features=images[2]),
        "embeddings": [embedded(1, halves), embedded(1, halves), embedded(2, halves), embedded(1, [True] * 3)],
        "refusals": warnings(3, "refused", address="10.0.0.9", reason="self-signed certificate"),
        "expired": warnings(3, "expired", request_id="r", claimed=False),
        "expired, but claimed": warnings(3, "expired", request_id="r", claimed=True),
        "embeddings of another type": [embedded(1, halves, torch.bfloat16), embedded(1, halves)],
    }
    with tempfile.TemporaryDirectory() as folder:
        found["an adapter that was replaced"] = replaced_adapter(folder)
        found["an adapter that was replaced meanwhile"] = replaced_meanwhile(folder)
        found["weight files"] = chosen(folder)
        found["overrides"] = [overridden(folder), overridden(folder, rope_theta=1e6), overridden(folder, rope_theta=1e6)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
