"""One vLLM engine in one process, driven by JSON lines: orders on standard input, events on standard output. Runs in vLLM's environment.

The loop steps exactly while the engine's scheduler has requests, as vLLM's own engine process does: what would leave that one asleep with
unfinished work leaves this one asleep too.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import zlib
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)

IDLE_SECONDS = 0.005


class EngineProcess:
    """Serves one engine until it is told to close or its input ends."""

    def __init__(self, settings: dict[str, Any], events: Any) -> None:
        from vllm import LLM

        self._events = events
        self._llm = LLM(**settings)
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._keys: dict[str, str] = {}
        self._stepping = True
        self._steps = 0

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        ahead = bool(self._llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
        self._say(event="ready", free=self._free(), ahead=ahead)
        while True:
            while (order := self._next()) is not None:
                if order["do"] == "close":
                    self._llm.llm_engine.engine_core.shutdown()
                    self._say(event="reply", value="closed")
                    return
                try:
                    value = getattr(self, "_do_" + order.pop("do"))(**order)
                except Exception as error:
                    self._say(event="error", error=f"{type(error).__name__}: {error}")
                else:
                    self._say(event="reply", value=value)
            if self._stepping:
                self._step()

    def _next(self) -> dict[str, Any] | None:
        """The next order, None where there is work to do first. Sleeps where there is neither."""
        busy = self._stepping and self._scheduler.has_requests()
        try:
            order = self._orders.get(timeout=IDLE_SECONDS) if not busy or not self._scheduler.running else self._orders.get_nowait()
        except queue.Empty:
            return None
        if order is None:
            sys.exit(0)
        return order

    def _read(self) -> None:
        for line in sys.stdin:
            self._orders.put(json.loads(line))
        self._orders.put(None)

    def _say(self, **event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")
        self._events.flush()

    def _step(self) -> None:
        if not self._scheduler.has_requests():
            return
        self._steps += 1
        for output in self._engine.step():
            if output.finished:
                self._finished(output)

    def _finished(self, output: Any) -> None:
        sample = output.outputs[0]
        chosen = [next(iter(entry.values())) if entry else None for entry in sample.logprobs or ()]
        self._say(
            event="finished",
            request_id=output.request_id,
            tokens=list(sample.token_ids),
            logprobs=[entry.logprob for entry in chosen if entry is not None],
            reason=sample.finish_reason,
            cached=output.num_cached_tokens,
            params=output.kv_transfer_params,
            steps=self._steps,
            time=time.monotonic(),
        )

    def _free(self) -> dict[str, int]:
        pool = self._scheduler.kv_cache_manager.block_pool
        return {"free": pool.get_num_free_blocks(), "requests": len(self._scheduler.requests), "steps": self._steps}

    # Orders.

    def _do_add(
        self, request_id: str, prompt: list[int], max_tokens: int, params: Any = None, adapter: str = "", vectors: int = 0, **sampling: Any
    ) -> str:
        """adapter: the folder of a LoRA, always under one name. vectors: the seed of embeddings that stand for the prompt's tokens."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = {"temperature": 0.0, "logprobs": 1, "ignore_eos": True, "detokenize": False, **sampling}
        extra = {"kv_transfer_params": params} if params is not None else None
        asked = SamplingParams(max_tokens=max_tokens, extra_args=extra, **sampling)
        lora = LoRARequest("tuned", 1 + zlib.crc32(adapter.encode()) % (2**31 - 1), adapter) if adapter else None
        given = {"prompt_embeds": self._vectors(vectors, len(prompt))} if vectors else {"prompt_token_ids": prompt}
        return self._engine.add_request(request_id, given, asked, lora_request=lora)

    def _vectors(self, seed: int, count: int) -> Any:
        import torch

        size = self._llm.llm_engine.model_config.get_hidden_size()
        return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))

    def _do_abort(self, request_ids: list[str]) -> None:
        self._engine.abort_request(request_ids, internal=True)

    def _do_state(self) -> dict[str, int]:
        return self._free()

    def _do_statuses(self) -> dict[str, str]:
        return {request_id: str(request.status) for request_id, request in self._scheduler.requests.items()}

    def _do_pause(self) -> None:
        self._stepping = False

    def _do_resume(self) -> None:
        self._stepping = True

    def _do_step(self, count: int = 1) -> dict[str, int]:
        for _ in range(count):
            self._step()
        return self._free()

    def _do_reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def _do_rpc(self, method: str, arguments: list[Any]) -> list[Any]:
        """Calls a method of tests.vllm.hooks.Hooks in every worker."""
        return list(self._llm.collective_rpc(method, args=tuple(arguments)))

    def _do_metrics(self) -> dict[str, float]:
        """Prometheus metrics of this process, kvbridge's and preemptions, by name and labels."""
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:num_preemptions":
                found[metric.name] = metric.value
            elif "kvbridge" in metric.name:
                labels = ",".join(f"{name}={metric.labels.get(name, '')}" for name in ("side", "event", "clause"))
                found[f"{metric.name}[{labels}]"] = metric.value
        return found


def main() -> None:
    # vLLM prints to standard output; only events may stand there.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    EngineProcess(json.loads(sys.argv[1]), events).serve()
    events.close()
    os._exit(0)


if __name__ == "__main__":
    main()
