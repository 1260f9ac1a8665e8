"""The back end itself: vLLM 0.32's TurboQuant one, with `attend` for decode tokens and one store kernel for both layouts.

What stays vLLM's: the cache's size and specification, the metadata, FlashAttention for the tokens of a prompt, and the expansion of
the cache for a long continuation of one. Imported by vLLM through plugin.register, in an environment that has vLLM.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.utils.math_utils import round_up
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import turboquant_attn as stock
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from backends.cuda.attend import Workspace, attend, configure
from backends.cuda.attend.build import Config
from backends.cuda.vllm_attention.planes import planes_of, slots_of
from backends.cuda.vllm_attention.refusals import check_engine, check_layer
from backends.cuda.vllm_attention.store import store
from backends.kernels.attend.pages import Pages

ROWS = stock._CONTINUATION_DECODE_THRESHOLD
"""A continuation of a prompt by up to so many tokens is read by the decode kernel, a row for each token."""


@dataclass(frozen=True)
class Scratch:
    """What calls of `attend` write beside their output, shared by all layers of one shape: they run one after another."""

    workspace: Workspace
    lse: torch.Tensor  # float32 [most rows, query heads], for nobody
    lengths: torch.Tensor  # int32 [most tokens + 1]: 0, 1, 2, ...


@functools.cache
def scratch(config: Config, kv_heads: int, query_heads: int, rows: int, tokens: int, device: torch.device) -> Scratch:
    """Allocated while the model is built, so that vLLM counts it before it sizes the cache."""
    return Scratch(
        Workspace.of(config, kv_heads, rows, device),
        torch.empty(rows, query_heads, dtype=torch.float32, device=device),
        torch.arange(tokens + 1, dtype=torch.int32, device=device),
    )


class AttendBuilder(stock.TurboQuantMetadataBuilder):
    """vLLM's metadata as it is; CUDA graphs for decode batches only."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        check_engine(
            speculative=vllm_config.speculative_config is not None,
            ubatching=vllm_config.parallel_config.use_ubatching,
            sequences=vllm_config.scheduler_config.max_num_seqs,
        )
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def _reserve_workspace(self) -> None:
        """Only what long continuations expand the cache into: the decode kernel has a workspace of its own."""
        scheduler = self.vllm_config.scheduler_config
        if not is_workspace_manager_initialized() or not scheduler.enable_chunked_prefill or scheduler.max_num_batched_tokens <= ROWS:
            return
        spec = self.kv_cache_spec
        tokens = round_up(max(0, self.vllm_config.model_config.max_model_len - 1), spec.block_size)
        shape = (1, spec.num_kv_heads, tokens, spec.head_size)
        current_workspace_manager().get_simultaneous((shape, torch.float16), (shape, torch.float16))


class AttendImpl(stock.TurboQuantAttentionImpl):
    """One layer."""

    layout: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        kv_heads, softcap = num_kv_heads or num_heads, logits_soft_cap or 0.0
        check_layer(
            kv_cache_dtype, self.layout, head_size, kv_heads, num_heads, softcap=softcap, alibi=alibi_slopes is not None,
            shared=kv_sharing_target_layer_name is not None, attention_type=str(getattr(attn_type, "value", attn_type)),
        )  # fmt: skip
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
            kv_sharing_target_layer_name, **extra,
        )  # fmt: skip
        self.softcap, self.window = softcap, sliding_window or 0
        # The sinks are a parameter that is loaded later: taken to float32 at the first use.
        self._sinks32: torch.Tensor | None = None
        self.fa_version: int | None = flash_attention_version(stock.get_flash_attn_version(head_size=head_size))
        self.config = configure(kv_cache_dtype, self.layout, head_size, kv_heads, num_heads // kv_heads, softcap=softcap > 0)
        settings = get_current_vllm_config()
        captured = settings.compilation_config.cudagraph_capture_sizes or [0]
        rows = max(settings.scheduler_config.max_num_seqs, max(captured), ROWS)
        self.scratch = self.make_scratch(rows, settings.model_config.max_model_len)

    def make_scratch(self, rows: int, tokens: int) -> Scratch:
        """Builds the kernel too, so that a missing compiler stops the start and not the first request."""
        device = torch.device("cuda", torch.cuda.current_device())
        return scratch(self.config, self.num_kv_heads, self.num_heads, rows, tokens, device)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """kv_cache: uint8 [pages, kv heads, page tokens, slot bytes], a token's heads beside each other in memory."""
        count = slot_mapping.shape[0]
        shape = (count, self.num_kv_heads, self.head_size)
        store(key[:count].view(shape), value[:count].view(shape), kv_cache.transpose(1, 2), slot_mapping, self.kv_cache_dtype, self.layout)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode rows come first in a batch (reorder_batch_threshold 1); prompts and their continuations follow."""
        if output is None:
            output = query.new_empty(query.shape[0], self.num_heads, self.head_size)
        if attn_metadata is None or attn_metadata.num_actual_tokens <= 0:
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        q, out = (x[:count].view(count, self.num_heads, self.head_size) for x in (query, output))
        cache = kv_cache.transpose(1, 2)
        decodes = attn_metadata.num_decode_tokens if attn_metadata.is_prefill else count
        if decodes:
            self.read(q[:decodes], cache, attn_metadata.block_table, attn_metadata.seq_lens[:decodes], out[:decodes])
        if decodes < count:
            shape = (count, self.num_kv_heads, self.head_size)
            self._ensure_on_device(layer, q.device)
            self.prefill(layer, q, key[:count].view(shape), value[:count].view(shape), cache, attn_metadata, out)
        return output

    def read(self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor) -> None:
        """Each query [B, Hq, D] over the first lengths[b] tokens of its sequence, into out."""
        data = planes_of(cache) if self.layout == "planes" else cache
        pages = Pages(data, self.kv_cache_dtype, self.layout, self.head_size, cache.shape[1])
        attend(
            q, pages, table, lengths, scale=self.scale, softcap=self.softcap, window=self.window, sinks=self.sinks32(), out=out,
            lse=self.scratch.lse[: q.shape[0]], workspace=self.scratch.workspace, config=self.config,
        )  # fmt: skip

    def sinks32(self) -> torch.Tensor | None:
        """The heads' sinks as `attend` wants them. vLLM runs a batch before it captures one, so that this allocates in no capture."""
        if self.sinks is not None and self._sinks32 is None:
            self._sinks32 = self.sinks.detach().to(torch.float32).contiguous()
        return self._sinks32

    def prefill(
        self, layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, meta: Any, out: torch.Tensor
    ) -> None:
        """Prompts of the batch, their first chunks and their later ones, into out; decode rows are left alone.

        Unlike vLLM 0.32, a batch counts as first chunks only if each of its sequences is one (vllm issue 46460).
        """
        first = meta.num_decodes
        starts = (meta.query_start_loc if meta.query_start_loc_cpu is None else meta.query_start_loc_cpu).tolist()[first:]
        lengths = (meta.seq_lens if meta.seq_lens_cpu is None else meta.seq_lens_cpu).tolist()[first:]
        counts = [b - a for a, b in itertools.pairwise(starts)]
        here = slice(starts[0], starts[-1])
        if all(count in (0, length) for count, length in zip(counts, lengths, strict=False)):
            cu = meta.query_start_loc[first:] - starts[0]
            out[here] = self._flash_attn_varlen(q[here], k[here], v[here], cu, cu, max(counts), max(counts))
            return
        for i, (count, length) in enumerate(zip(counts, lengths, strict=False)):
            if not count:
                continue
            rows, table = slice(starts[i], starts[i + 1]), meta.block_table[first + i : first + i + 1]
            cached = length - count
            if not cached:
                cu = self.scratch.lengths[0 : count + 1 : count]
                out[rows] = self._flash_attn_varlen(q[rows], k[rows], v[rows], cu, cu, count, count)
            elif count <= ROWS:
                self.read(q[rows], cache, table.expand(count, -1), self.scratch.lengths[cached + 1 : length + 1], out[rows])
            else:
                slots = cache
                if self.layout == "planes":
                    pages = -(-cached // cache.shape[1])
                    slots = slots_of(cache, table[0, :pages], self.kv_cache_dtype, self.head_size)
                    table = self.scratch.lengths[None, :pages]
                out[rows] = self._continuation_prefill(
                    layer, q[rows], k[rows], v[rows], slots, table, cached, length, layer._tq_Pi, layer._tq_centroids
                )

    def _flash_attn_varlen(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> torch.Tensor:
        """vLLM's own, with the window, the soft cap and the sinks that it leaves out."""
        return stock.flash_attn_varlen_func(
            q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q.contiguous(), cu_seqlens_k=cu_seqlens_k.contiguous(), max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, softmax_scale=self.scale, causal=True, softcap=self.softcap, s_aux=self.sinks,
            window_size=[self.window - 1, 0] if self.window else None, fa_version=self.fa_version,
        )  # fmt: skip


def flash_attention_version(chosen: int | None) -> int | None:
    """vLLM sets FlashAttention 2 for a whole engine with a TurboQuant cache; for prompts, on tensors outside the cache, 3 is faster."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported
    except ImportError:
        return chosen
    return 3 if chosen == 2 and is_fa_version_supported(3) else chosen


class AttendBackend(stock.TurboQuantAttentionBackend):
    """What vLLM asks before it builds a layer."""

    layout: ClassVar[str]

    @staticmethod
    def get_builder_cls() -> type[AttendBuilder]:
        return AttendBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in (64, 128, 256)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class SlotsImpl(AttendImpl):
    layout = "slots"


class PlanesImpl(AttendImpl):
    layout = "planes"


class SlotsBackend(AttendBackend):
    """vLLM's slots: the cache's bytes are those of vLLM's own back end."""

    layout = "slots"

    @staticmethod
    def get_impl_cls() -> type[SlotsImpl]:
        return SlotsImpl


class PlanesBackend(AttendBackend):
    """The same bytes of a page as blocks of planes. No KV connector: they would take the pages for slots."""

    layout = "planes"

    @staticmethod
    def get_impl_cls() -> type[PlanesImpl]:
        return PlanesImpl

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False
