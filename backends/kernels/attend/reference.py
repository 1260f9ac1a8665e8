"""`attend` in plain float64: what the kernel is tested against. Any torch device; slow and memory-hungry on purpose."""

from __future__ import annotations

import torch

from backends.kernels.attend.pages import PRESETS, TILE, Pages, centroids, slot_bytes


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] bytes -> [..., n * 8 / bits] integers of an LSB-first bit stream."""
    flat = (codes.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
    parts = flat.reshape(*codes.shape[:-1], codes.shape[-1] * 8 // bits, bits).to(torch.int64)
    return (parts << torch.arange(bits, device=codes.device)).sum(-1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """[..., D] times the +-1 Sylvester-Hadamard matrix."""
    d = x.shape[-1]
    h = 1
    while h < d:
        y = x.reshape(*x.shape[:-1], d // (2 * h), 2, h)
        x = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), -2).reshape(*x.shape)
        h *= 2
    return x


def _scalars(raw: torch.Tensor) -> torch.Tensor:
    return raw.contiguous().view(torch.float16).to(torch.float64)


def decode(pages: Pages, row: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, kv heads, D] float64 of the sequence whose pages are `row`."""
    key, value = PRESETS[pages.preset]
    d, slot = pages.head_dim, slot_bytes(pages.preset, pages.head_dim)
    kr, vr, ks = d * key // 8, d * value // 8, 0 if key == 8 else 2
    raw = pages.data[row[: -(-length // pages.page_tokens)].long()]
    n, heads = raw.shape[0], pages.kv_heads
    if pages.layout == "planes":
        blocks = raw.reshape(n, heads, -1, TILE * slot).transpose(1, 2).reshape(-1, heads, TILE * slot)
        planes = blocks.split((TILE * kr, TILE * vr, TILE * ks, TILE * 4), -1)
        rows = (x.reshape(x.shape[0], heads, TILE, x.shape[-1] // TILE).transpose(1, 2) for x in planes)
        k, v, kn, vs = (x.reshape(x.shape[0] * TILE, heads, x.shape[-1])[:length] for x in rows)
    else:
        k, kn, v, vs = raw.reshape(-1, heads, slot)[:length].split((kr, ks, vr, 4), -1)
    if key == 8:
        keys = k.contiguous().view(torch.float8_e4m3fn).to(torch.float64)
    else:
        book = torch.tensor(centroids(d, key), dtype=torch.float64, device=raw.device)
        c = book[unpack(k, key)]
        norm = _scalars(kn)
        if not pages.folded:
            norm = norm / (c.square().sum(-1, keepdim=True) + 1e-16).sqrt()
        keys = rotate(c) * (norm * d**-0.5)
    scale = _scalars(vs)
    return keys, unpack(v, value) * scale[..., :1] + scale[..., 1:]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the `attend` of every implementation, in float64: (out [B, Hq, D], lse [B, Hq])."""
    batch, query_heads, d = queries.shape
    group = query_heads // pages.kv_heads
    out = torch.zeros(batch, query_heads, d, dtype=torch.float64, device=queries.device)
    lse = torch.full((batch, query_heads), -torch.inf, dtype=torch.float64, device=queries.device)
    for b, n in enumerate(lengths.tolist()[:batch]):
        first = max(0, n - window) if window > 0 else 0
        logits, values = torch.empty(query_heads, 0, dtype=torch.float64, device=queries.device), None
        if n:
            keys, values = decode(pages, table[b], n)
            q = queries[b].to(torch.float64).reshape(pages.kv_heads, group, d) * (d**-0.5 if scale is None else scale)
            s = torch.einsum("hgd,thd->hgt", q, keys[first:])
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            logits = s.reshape(query_heads, -1)
        if sinks is not None:
            logits = torch.cat((logits, sinks.to(torch.float64)[:, None]), 1)
        if logits.shape[1] == 0:
            continue
        lse[b] = torch.logsumexp(logits, 1)
        if values is not None:
            p = torch.exp(logits - lse[b][:, None])[:, : n - first].reshape(pages.kv_heads, group, -1)
            out[b] = torch.einsum("hgt,thd->hgd", p, values[first:]).reshape(query_heads, d)
    return out, lse
