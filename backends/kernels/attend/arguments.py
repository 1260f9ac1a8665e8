"""What a call of `attend` may be, whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.kernels.attend.pages import Pages

MAX_BATCH = 4096  # sequences a call: every program sums their tiles
MAX_GROUP = 16  # query heads a kv head: rows of one matrix product


@dataclass(frozen=True)
class AttendTuning:
    """Launch parameters of the shared kernel, chosen per architecture. Any value gives a correct result.

    tokens: of one tile, a power of two from 16. warps: of one program. stages: tiles on their way at once, and the one at work. programs:
    of one multiprocessor. registers: at most so many a thread, 0: the compiler's choice (CUDA only). taken, merge_warps: partial results
    of one step of the merge, and its warps. narrow: matrix products of 8 columns where a group has no more. integer_cast: round to bf16
    by integer arithmetic. lanes: threads of a warp, 0: the compiler's choice; large_registers: twice the registers for half the threads
    (both Intel only). key_depth: of one matrix product of fp8 keys, a power of two from 16; 0: half of the head dimension.
    """

    tokens: int = 64
    warps: int = 1
    stages: int = 2
    programs: int = 12
    registers: int = 0
    taken: int = 8
    merge_warps: int = 1
    narrow: bool = True
    integer_cast: bool = False
    lanes: int = 0
    large_registers: bool = False
    key_depth: int = 0

    def options(self) -> dict[str, int | str]:
        """Triton's launch options, of both launches."""
        made: dict[str, int | str] = {"threads_per_warp": self.lanes} if self.lanes else {}
        if self.large_registers:
            made["grf_mode"] = "large"
        return made


def check_group(group: int) -> None:
    """Raises ValueError for a number of query heads per kv head that is not served."""
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{group} query heads per kv head: 1 to {MAX_GROUP} are supported")


def check_call(
    queries: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    window: int,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> int:
    """The query heads of a kv head. Raises ValueError for arguments that do not fit each other; they are those of `attend`."""
    batch, query_heads, dim = queries.shape
    heads = pages.kv_heads
    if query_heads % heads or dim != pages.head_dim or queries.stride(2) != 1:
        raise ValueError(f"queries of shape {tuple(queries.shape)} do not fit a cache of {heads} kv heads and head dim {pages.head_dim}")
    if queries.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"queries are {queries.dtype}: float16 or bfloat16 is needed")
    ints = table.dtype == lengths.dtype == torch.int32 and table.stride(1) == 1 and lengths.is_contiguous()
    if not ints or table.shape[0] < batch or lengths.numel() < batch:
        raise ValueError("table [B, pages] and lengths [B] must be int32 tensors with at least B rows")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.numel() != query_heads or not sinks.is_contiguous()):
        raise ValueError("sinks must be a contiguous float32 tensor [Hq]")
    if any(x is not None and x.device != queries.device for x in (pages.data, table, lengths, sinks, out, lse)):
        raise ValueError("queries, pages, table, lengths, sinks, out and lse must be on one device")
    if pages.data.stride(0) >= 1 << 32 or window < 0:
        raise ValueError("a page must be smaller than 4 GiB and window not negative")
    if batch > MAX_BATCH:
        raise ValueError(f"a batch of {batch}: at most {MAX_BATCH} sequences a call, split it")
    if out is not None and (out.shape != queries.shape or out.dtype != queries.dtype or out.stride(2) != 1):
        raise ValueError("out must have the queries' shape and dtype, and a contiguous last dimension")
    if lse is not None and (lse.shape != (batch, query_heads) or lse.dtype != torch.float32 or not lse.is_contiguous()):
        raise ValueError("lse must be contiguous float32 [B, Hq]")
    check_group(query_heads // heads)
    return query_heads // heads
