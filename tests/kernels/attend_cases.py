"""Random pages, and what every implementation of `attend` is held to: float64 attention over the decoded pages."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # to be chosen before triton is imported

from backends.accelerator import attend as shared
from backends.cuda.tuning import attend_tuning
from backends.kernels.attend import reference
from backends.kernels.attend.arguments import AttendTuning
from backends.kernels.attend.pages import PRESETS, Pages, slot_bytes

LIMIT = 2e-3  # relative error of a whole batch's output
LENGTHS = (1, 15, 16, 17, 33, 127, 128, 129, 1000, 4099)


@dataclass(frozen=True)
class Implementation:
    """attend: called as in docs/attend.md. workspace: of (pages, query heads a kv head, batch, soft cap)."""

    device: str
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    workspace: Callable[[Pages, int, int, float], Any]


def triton_implementation(device: str, tuning: AttendTuning | None = None) -> Implementation:
    """The shared kernel. tuning: the shipped one for NVIDIA cards if None."""

    def of(pages: Pages, group: int) -> AttendTuning:
        return tuning or attend_tuning(pages.preset, pages.layout, pages.head_dim, group)

    def attend(queries, pages, *rest, **options):
        return shared.attend(queries, pages, *rest, tuning=of(pages, queries.shape[1] // pages.kv_heads), **options)

    def workspace(pages, group, batch, softcap):
        return shared.Workspace.of(pages.kv_heads, group, pages.head_dim, batch, pages.data.device, of(pages, group))

    return Implementation(device, attend, workspace)


def cuda_implementation() -> Implementation:
    """backends/cuda/attend."""
    from backends.cuda.attend import Workspace, attend, configure

    def workspace(pages, group, batch, softcap):
        config = configure(pages.preset, pages.layout, pages.head_dim, pages.kv_heads, group, softcap=softcap > 0, folded=pages.folded)
        return Workspace.of(config, pages.kv_heads, batch, pages.data.device)

    return Implementation("cuda", attend, workspace)


def make(device, preset, layout, dim, heads, lengths, page_tokens=16, folded=False, seed=0, scale_of=0.3, norm_of=1.0, spare=3):
    """Pages, table and lengths: random pages in random order; everything no token owns is 0xFF (NaN in every scalar)."""
    gen = torch.Generator(device=device).manual_seed(seed)
    key, value = PRESETS[preset]
    slot = slot_bytes(preset, dim)
    kr, vr, ks = dim * key // 8, dim * value // 8, 0 if key == 8 else 2
    counts = [-(-n // page_tokens) for n in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=gen, device=device).to(torch.int32)
    table = torch.full((len(lengths), max(max(counts), 1) + 2), 0x7FFFFFF0, dtype=torch.int32, device=device)
    # one record [slot] per token, then laid out
    records = torch.full((total, page_tokens, heads, slot), 0xFF, dtype=torch.uint8, device=device)
    at = 0
    for b, (n, c) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[at : at + c]
        at += c
        table[b, :c] = mine
        if n == 0:
            continue

        def rand(*shape, gen=gen):
            return torch.randn(*shape, generator=gen, device=device)

        rows = torch.empty(n, heads, slot, dtype=torch.uint8, device=device)
        if key == 8:
            rows[..., :kr] = (rand(n, heads, dim) * norm_of).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            rows[..., :kr] = torch.randint(0, 256, (n, heads, kr), generator=gen, device=device, dtype=torch.uint8)
            norm = (rand(n, heads, 1).mul(0.2).exp() * dim**0.5 * norm_of).to(torch.float16)
            rows[..., kr : kr + ks] = norm.view(torch.uint8)
        rows[..., kr + ks : kr + ks + vr] = torch.randint(0, 256, (n, heads, vr), generator=gen, device=device, dtype=torch.uint8)
        scale = (rand(n, heads, 1).mul(0.3).exp() * scale_of).to(torch.float16)
        zero = (-scale.float() * (2**value - 1) * (0.5 + 0.05 * rand(n, heads, 1))).to(torch.float16)
        rows[..., kr + ks + vr :] = torch.cat((scale, zero), -1).view(torch.uint8)
        padded = torch.full((c * page_tokens, heads, slot), 0xFF, dtype=torch.uint8, device=device)
        padded[:n] = rows
        records[mine.long()] = padded.reshape(c, page_tokens, heads, slot)
    if layout == "slots":
        data = records
    else:
        blocks = records.reshape(total, page_tokens // 16, 16, heads, slot).permute(0, 3, 1, 2, 4)  # page, head, block, token, slot
        k, kn, v, vs = blocks.split((kr, ks, vr, 4), -1)
        data = torch.cat([x.reshape(*x.shape[:3], -1) for x in (k, v, kn, vs)], -1).reshape(total, heads, -1).contiguous()
    pages = Pages(data, preset, layout, dim, page_tokens, folded)
    return pages, table, torch.tensor(lengths, dtype=torch.int32, device=device)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(of: Implementation, made, group, dtype=torch.float16, spread=1.0, limit=LIMIT, lse_limit=5e-3, **options):
    """Runs one call into poisoned memory and compares. made: of `make`. Returns the relative error."""
    pages, table, lengths = made
    gen = torch.Generator(device=of.device).manual_seed(7)
    q = (torch.randn(len(lengths), pages.kv_heads * group, pages.head_dim, generator=gen, device=of.device) * spread).to(dtype)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float32, device=of.device)
    space = of.workspace(pages, group, len(lengths), options.get("softcap", 0.0))
    space.part.fill_(float("nan"))
    space.ml.fill_(float("nan"))
    of.attend(q, pages, table, lengths, out=out, lse=lse, workspace=space, **options)
    want, want_lse = reference.attend(q, pages, table, lengths, **options)
    assert bool(torch.isfinite(out).all())
    worst = max(error(out[b], want[b]) for b in range(len(lengths)) if lengths[b] > 0)
    # bf16 outputs are rounded to 8 bits: 2^-9 / sqrt(3) on top
    assert error(out, want) <= limit + (1.2e-3 if dtype == torch.bfloat16 else 0), error(out, want)
    assert worst <= 2 * limit + (1.2e-3 if dtype == torch.bfloat16 else 0), worst
    some = torch.isfinite(want_lse)
    assert bool((torch.isfinite(lse) == some).all())
    assert (lse.double() - want_lse)[some].abs().max().item() <= lse_limit
    return error(out, want)
