"""`attend`: the host side of the decode attention kernel. Two launches a call; no allocation when workspace and outputs are given."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from backends.cuda.attend.build import Config, Params, load
from backends.kernels.attend.arguments import check_call, check_group
from backends.kernels.attend.pages import PRESETS, TILE, Pages, block_bytes, check_pages
from backends.kernels.attend.pages import table as table_of
from bridge.devices import DeviceError

SHARED_LIMIT = 227 * 1024  # bytes of shared memory a block may have on sm_90
MIN_TILES = 8  # a group of warps takes at least this many tiles: fewer, and partial results cost more than they save


class AttendError(DeviceError):
    """CUDA refused a launch; the message carries CUDA's own words."""

    clause = "attend_launch"


def configure(preset: str, layout: str, head_dim: int, kv_heads: int, group: int, *, softcap: bool = False, folded: bool = False) -> Config:
    """The build that serves such pages (see Pages) and this many query heads per kv head. ValueError if none does."""
    check_pages(preset, layout, head_dim, folded)
    check_group(group)
    if not 1 <= kv_heads <= 16:
        raise ValueError(f"{kv_heads} kv heads in one cache: at most 16 are supported, split the cache by heads")
    key, value = PRESETS[preset]
    slots, heavy = layout == "slots", (2 if group > 8 else 1) * head_dim > 128
    warps = max(8 if heavy else 16, kv_heads)
    rings = warps // kv_heads * kv_heads if slots else warps
    table = 0 if key == 8 else (1 << 2 * key) * 256
    room = SHARED_LIMIT - table - rings * 6 * 16
    most = 4 if slots or heavy else 3  # deeper rings let warps drift apart, and the memory's rows are then visited twice: measured
    stages = min(most, room // (rings * block_bytes(preset, head_dim)))
    while slots and stages < 3 and rings > kv_heads:  # a slot ring is shared by the warps of one group: one warp per kv head
        rings -= kv_heads
        warps = rings
        stages = min(most, room // (rings * block_bytes(preset, head_dim)))
    while not slots and stages < 3 and warps - 4 >= kv_heads:
        warps -= 4
        stages = min(most, room // (warps * block_bytes(preset, head_dim)))
    n_tiles = 2 if group > 8 else 1
    merging = warps // kv_heads * kv_heads * n_tiles * 8 * (head_dim + 2) * 4  # of the groups of one block, in the rings' place
    if stages < 2 or table + merging > SHARED_LIMIT:
        raise ValueError(f"{kv_heads} kv heads of {preset} at head dim {head_dim} do not fit in shared memory: split the cache by heads")
    return Config(
        head_dim=head_dim, key_bits=key, value_bits=value, slots=int(slots), n_tiles=n_tiles, folded=int(folded),
        softcap=int(softcap), warps=warps, stages=stages, arrive_all=int(slots),
    )  # fmt: skip


@functools.cache
def _blocks(config: Config, kv_heads: int, device: int) -> int:
    with torch.cuda.device(device):
        n = load(config).attend_blocks(kv_heads)
    if n < 1:
        raise AttendError(f"the device cannot run attend: {load(config).attend_error(-n).decode()}")
    return n


def _places(config: Config, kv_heads: int, batch: int, device: int) -> int:
    """Partial results of one call: one for each group of warps and one more for each sequence boundary, of every head."""
    return (_blocks(config, kv_heads, device) * (config.warps // kv_heads) + batch) * kv_heads * config.n_tiles * 8


@dataclass(frozen=True)
class Workspace:
    """Partial outputs of one call: [places, D] float32 and [places, 2] float32. Calls that may overlap need one each."""

    part: torch.Tensor
    ml: torch.Tensor

    @classmethod
    def of(cls, config: Config, kv_heads: int, max_batch: int, device: torch.device) -> Workspace:
        """Room for any batch up to max_batch of a cache of `config` (see configure)."""
        places = _places(config, kv_heads, max_batch, device.index or 0)
        return cls(
            torch.empty(places, config.head_dim, dtype=torch.float32, device=device),
            torch.empty(places, 2, dtype=torch.float32, device=device),
        )


def attend(
    queries: torch.Tensor,
    pages: Pages,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    config: Config | None = None,
    parts: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention: each query over its sequence's cached tokens.

    queries    [B, Hq, D] fp16 or bf16, last dimension contiguous, not rotated
    table      [B, most pages] int32: pages of a sequence in order; entries past its last page are never read
    lengths    [B] int32: tokens of a sequence, 0 allowed (output 0, lse -inf)
    scale      of the scores, 1/sqrt(D) if None
    softcap    scores become softcap * tanh(score / softcap); 0: off
    window     a query sees the last `window` tokens only; 0: all
    sinks      [Hq] float32: one more logit a head in the denominator, without a value
    out, lse   [B, Hq, D] of the queries' dtype and [B, Hq] float32 (natural logarithm), allocated if None
    config, parts  for measurements: another build, and 1 = first launch only, 2 = merge only
    Returns (out, lse). Capturable in a CUDA graph when out, lse and workspace are given.
    Raises ValueError for arguments that do not fit, BuildError where nvcc is missing, AttendError for what CUDA refuses.
    """
    group = check_call(queries, pages, table, lengths, window, sinks, out, lse)
    batch, query_heads, dim = queries.shape
    heads = pages.kv_heads
    if any(s % 2 for s in queries.stride()[:2]) or queries.data_ptr() % 4:
        raise ValueError("queries must lie at multiples of 4 bytes")
    config = config or configure(pages.preset, pages.layout, pages.head_dim, heads, group, softcap=softcap > 0, folded=pages.folded)
    device = queries.device.index or 0
    blocks, places = _blocks(config, heads, device), _places(config, heads, batch, device)
    if workspace is None:
        workspace = Workspace.of(config, heads, batch, queries.device)
    elif workspace.part.shape[0] < places:
        raise ValueError("the workspace is too small for this batch: make it with Workspace.of(..., max_batch)")
    out = torch.empty_like(queries) if out is None else out
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=queries.device) if lse is None else lse
    if any(s % 2 for s in out.stride()[:2]) or out.data_ptr() % 4:
        raise ValueError("out must lie at multiples of 4 bytes")
    scale = dim**-0.5 if scale is None else scale
    key, _ = PRESETS[pages.preset]
    p = Params(
        q=queries.data_ptr(), kv=pages.data.data_ptr(), table=table.data_ptr(), lens=lengths.data_ptr(),
        part=workspace.part.data_ptr(), ml=workspace.ml.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        q_b=queries.stride(0), q_h=queries.stride(1), o_b=out.stride(0), o_h=out.stride(1),
        page=pages.data.stride(0), head=pages.data.stride(1) if pages.layout == "planes" else 0, table_b=table.stride(0),
        batch=batch, kv_heads=heads, group=group, page_shift=(pages.page_tokens // TILE).bit_length() - 1, window=window,
        q_bf16=int(queries.dtype == torch.bfloat16), groups=blocks * (config.warps // heads), blocks=blocks, min_tiles=MIN_TILES,
        scale_log2=scale if softcap > 0 else scale * math.log2(math.e), softcap=softcap,
    )  # fmt: skip
    if key != 8:
        book, factor = table_of(dim, key)
        p.centroids[: len(book)] = book
        if pages.folded:
            p.scale_log2 *= math.sqrt(dim) / factor
    lib = load(config)
    with torch.cuda.device(device):
        code = lib.attend_launch(p, torch.cuda.current_stream(device).cuda_stream, parts)
    if code:
        raise AttendError(f"attend could not be launched: {lib.attend_error(code).decode()}")
    return out, lse
