"""`attend` in Triton, for every vendor: the host side of backends/kernels/attend/kernels.py. Two launches a call."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import triton

from backends.kernels.attend.arguments import AttendTuning, check_call
from backends.kernels.attend.kernels import merge_kernel, pages_kernel
from backends.kernels.attend.pages import PRESETS, TILE, Pages, centroids
from backends.kernels.elements import BF16, FP16

LEAST_TOKENS = 128  # of one program: fewer, and partial results cost more than they save
LEAST_BATCH = 128  # for which the kernels are built: smaller batches need no build of their own
HOST_PROGRAMS = 4  # where there is no accelerator: Triton's interpreter, the emulated XPU


@functools.cache
def polynomial(head_dim: int, bits: int) -> tuple[float, float, float, float, float]:
    """k0 .. k4 of x (k0 + k1 x^2 + ...): the centroids times sqrt(D) at x = (2 code - levels + 1) / levels. Least squares.

    Exact for 3 bits with four terms; 1.9e-4 of the root mean square for 4 bits with five, below the rounding of fp16 that follows.
    """
    levels = 1 << bits
    book = np.array(centroids(head_dim, bits))[levels // 2 :] * head_dim**0.5
    x = (2 * np.arange(levels // 2, levels) - levels + 1) / levels
    terms = 5 if bits == 4 else 4
    powers = np.stack([x ** (2 * i + 1) for i in range(terms)], 1)
    made = [*np.linalg.lstsq(powers, book, rcond=None)[0].tolist(), 0.0]
    return made[0], made[1], made[2], made[3], made[4]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "gpu_subslice_count", 0) or 16)


def programs_of(kv_heads: int, tuning: AttendTuning, device: torch.device) -> int:
    """Programs of each kv head: as many as run at once."""
    return max(1, (_multiprocessors(device) * tuning.programs or HOST_PROGRAMS) // kv_heads)


@dataclass(frozen=True)
class Workspace:
    """Partial outputs of one call: fp32 [places, D] and [places, 2]. Calls that may overlap need one each."""

    part: torch.Tensor
    ml: torch.Tensor

    @classmethod
    def of(cls, kv_heads: int, group: int, head_dim: int, max_batch: int, device: torch.device, tuning: AttendTuning) -> Workspace:
        """Room for any batch up to max_batch: a place for each program, and one more for each sequence that it does not end with."""
        places = (programs_of(kv_heads, tuning, device) + max_batch) * kv_heads * group
        return cls(
            torch.empty(places, head_dim, dtype=torch.float32, device=device), torch.empty(places, 2, dtype=torch.float32, device=device)
        )


def attend(
    queries: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    tuning: AttendTuning,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention: each query over its sequence's cached tokens.

    queries    [B, Hq, D] fp16 or bf16, last dimension contiguous, not rotated
    table      [B, most pages] int32: pages of a sequence in order; entries past its last page are never read
    lengths    [B] int32: tokens of a sequence, 0 allowed (output 0, lse -inf)
    tuning     launch parameters: backends.cuda.tuning.attend_tuning, backends.xpu.attend.attend_tuning
    scale      of the scores, 1/sqrt(D) if None
    softcap    scores become softcap * tanh(score / softcap); 0: off
    window     a query sees the last `window` tokens only; 0: all
    sinks      [Hq] float32: one more logit a head in the denominator, without a value
    out, lse   [B, Hq, D] of the queries' dtype and [B, Hq] float32 (natural logarithm), allocated if None
    Returns (out, lse). Capturable in a graph when out, lse and workspace are given. fp8 keys that are NaN read as 480.
    Raises ValueError for arguments that do not fit.
    """
    group = check_call(queries, pages, table, lengths, window, sinks, out, lse)
    batch, query_heads, dim = queries.shape
    heads, device = pages.kv_heads, queries.device
    if workspace is None:
        workspace = Workspace.of(heads, group, dim, batch, device, tuning)
    programs = programs_of(heads, tuning, device)
    if workspace.part.shape[0] < (programs + batch) * query_heads or workspace.part.shape[1] != dim:
        raise ValueError("the workspace is too small for this batch: make it with Workspace.of(..., max_batch)")
    out = torch.empty_like(queries) if out is None else out
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=device) if lse is None else lse
    if not batch:
        return out, lse
    key, value = PRESETS[pages.preset]
    # fp8 keys are read as 2^-8 of themselves; a centroid in units of sigma is sqrt(D) times itself, which the norm correction cancels
    unit = 256.0 if key == 8 else 1 / dim if pages.folded else dim**-0.5
    gain = (dim**-0.5 if scale is None else scale) * unit * math.log2(math.e)
    element = (BF16 if queries.dtype == torch.bfloat16 else FP16).value
    planes = pages.layout == "planes"
    least = max(1, LEAST_TOKENS // tuning.tokens)
    shared = dict(D=dim, ELEMENT=element, TOKENS=tuning.tokens, BATCH=max(LEAST_BATCH, triton.next_power_of_2(batch)), **tuning.options())
    limit = {"maxnreg": tuning.registers} if tuning.registers else {}
    k0, k1, k2, k3, k4 = (0.0,) * 5 if key == 8 else polynomial(dim, key)
    pages_kernel[(programs * heads,)](
        queries.view(torch.int16), pages.data, table, lengths, workspace.part, workspace.ml,
        queries.stride(0), queries.stride(1), pages.data.stride(0), pages.data.stride(1) if planes else 0, table.stride(0),
        batch, heads, group, window, programs, least, gain, softcap * math.log2(math.e),
        KEY_BITS=key, VALUE_BITS=value, PLANES=planes, FOLDED=pages.folded, SOFTCAP=softcap > 0, PAGE_BLOCKS=pages.page_tokens // TILE,
        ROWS=8 if tuning.narrow and group <= 8 else 16,
        K0=k0, K1=k1, K2=k2, K3=k3, K4=k4, KEY_DEPTH=min(tuning.key_depth, dim // 4) if key == 8 else 0,
        num_warps=tuning.warps, num_stages=tuning.stages, **shared, **limit,
    )  # fmt: skip
    merge_kernel[(batch * query_heads,)](
        workspace.part, workspace.ml, lengths, lse if sinks is None else sinks, out.view(torch.int16), lse,
        out.stride(0), out.stride(1), batch, heads, group, window, programs, least,
        INTEGER_CAST=tuning.integer_cast, SINKS=sinks is not None, TAKEN=tuning.taken, num_warps=tuning.merge_warps, **shared,
    )  # fmt: skip
    return out, lse
