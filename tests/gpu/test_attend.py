"""Decode attention over TurboQuant pages, on a real CUDA device, against float64 attention over the decoded pages."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backends.cuda.attend import (  # noqa: E402
    PRESETS,
    Pages,
    Workspace,
    attend,
    configure,
    reference,
    slot_bytes,
)

pytestmark = pytest.mark.cuda
LIMIT = 2e-3  # relative error of a whole batch's output
LENGTHS = (1, 15, 16, 17, 33, 127, 128, 129, 1000, 4099)


def make(preset, layout, dim, heads, lengths, page_tokens=16, folded=False, seed=0, scale_of=0.3, norm_of=1.0, spare=3):
    """Random pages in random order; everything no token owns is 0xFF (NaN in every scalar)."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    key, value = PRESETS[preset]
    slot = slot_bytes(preset, dim)
    kr, vr, ks = dim * key // 8, dim * value // 8, 0 if key == 8 else 2
    counts = [-(-n // page_tokens) for n in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=gen, device="cuda").to(torch.int32)
    table = torch.full((len(lengths), max(max(counts), 1) + 2), 0x7FFFFFF0, dtype=torch.int32, device="cuda")
    # one record [slot] per token, then laid out
    records = torch.full((total, page_tokens, heads, slot), 0xFF, dtype=torch.uint8, device="cuda")
    at = 0
    for b, (n, c) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[at : at + c]
        at += c
        table[b, :c] = mine
        if n == 0:
            continue

        def rand(*shape, gen=gen):
            return torch.randn(*shape, generator=gen, device="cuda")

        rows = torch.empty(n, heads, slot, dtype=torch.uint8, device="cuda")
        if key == 8:
            rows[..., :kr] = (rand(n, heads, dim) * norm_of).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            rows[..., :kr] = torch.randint(0, 256, (n, heads, kr), generator=gen, device="cuda", dtype=torch.uint8)
            norm = (rand(n, heads, 1).mul(0.2).exp() * dim**0.5 * norm_of).to(torch.float16)
            rows[..., kr : kr + ks] = norm.view(torch.uint8)
        rows[..., kr + ks : kr + ks + vr] = torch.randint(0, 256, (n, heads, vr), generator=gen, device="cuda", dtype=torch.uint8)
        scale = (rand(n, heads, 1).mul(0.3).exp() * scale_of).to(torch.float16)
        zero = (-scale.float() * (2**value - 1) * (0.5 + 0.05 * rand(n, heads, 1))).to(torch.float16)
        rows[..., kr + ks + vr :] = torch.cat((scale, zero), -1).view(torch.uint8)
        padded = torch.full((c * page_tokens, heads, slot), 0xFF, dtype=torch.uint8, device="cuda")
        padded[:n] = rows
        records[mine.long()] = padded.reshape(c, page_tokens, heads, slot)
    if layout == "slots":
        data = records
    else:
        blocks = records.reshape(total, page_tokens // 16, 16, heads, slot).permute(0, 3, 1, 2, 4)  # page, head, block, token, slot
        k, kn, v, vs = blocks.split((kr, ks, vr, 4), -1)
        data = torch.cat([x.reshape(*x.shape[:3], -1) for x in (k, v, kn, vs)], -1).reshape(total, heads, -1).contiguous()
    pages = Pages(data, preset, layout, dim, page_tokens, folded)
    return pages, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def space_of(pages, group, batch, softcap=0.0):
    config = configure(pages.preset, pages.layout, pages.head_dim, pages.kv_heads, group, softcap=softcap > 0, folded=pages.folded)
    return Workspace.of(config, pages.kv_heads, batch, pages.data.device)


def error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def check(pages, table, lengths, group, dtype=torch.float16, spread=1.0, limit=LIMIT, lse_limit=5e-3, **options):
    gen = torch.Generator(device="cuda").manual_seed(7)
    q = (torch.randn(len(lengths), pages.kv_heads * group, pages.head_dim, generator=gen, device="cuda") * spread).to(dtype)
    out = torch.full_like(q, float("nan"))
    lse = torch.full(q.shape[:2], float("nan"), dtype=torch.float32, device="cuda")
    space = space_of(pages, group, len(lengths), options.get("softcap", 0.0))
    space.part.fill_(float("nan"))
    space.ml.fill_(float("nan"))
    attend(q, pages, table, lengths, out=out, lse=lse, workspace=space, **options)
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


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["planes", "slots"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_ragged_batch(preset, layout, dim, group):
    print("error", check(*make(preset, layout, dim, 2, LENGTHS), group))


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("layout", ["planes", "slots"])
def test_pages_and_heads(layout, heads, page_tokens):
    check(*make("turboquant_4bit_nc", layout, 128, heads, LENGTHS, page_tokens), 8 if heads < 16 else 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_and_short_together(dtype):
    check(*make("turboquant_4bit_nc", "planes", 128, 4, (1, 40000, 0, 3, 0, 5000, 17)), 8, dtype)


@pytest.mark.parametrize("count", [300, 1300])
def test_many_sequences(count):
    check(*make("turboquant_4bit_nc", "planes", 128, 4, tuple((i * 37) % 301 for i in range(count))), 8)


@pytest.mark.parametrize("layout", ["planes", "slots"])
def test_folded_norm(layout):
    check(*make("turboquant_4bit_nc", layout, 128, 4, LENGTHS, folded=True), 8)


@pytest.mark.parametrize("options", [{"window": 100}, {"window": 16}, {"window": 1}, {"softcap": 5.0}, {"scale": 0.3}], ids=str)
def test_options(options):
    check(*make("turboquant_4bit_nc", "planes", 128, 4, LENGTHS), 8, lse_limit=2e-2 if "scale" in options else 5e-3, **options)


def test_sinks():
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 4, LENGTHS)
    check(pages, table, lengths, 8, sinks=torch.linspace(-5, 10, 32, device="cuda"))


@pytest.mark.parametrize("spread", [0.01, 8.0, 1000.0])
@pytest.mark.parametrize(("scale_of", "norm_of"), [(0.3, 1.0), (1e-4, 1.0), (300.0, 1.0), (0.3, 1e-3), (0.3, 500.0)])
def test_extremes(spread, scale_of, norm_of):
    """Sharp and flat softmaxes, tiny and large values and norms. Beyond logits of 10 the rounding of the queries to fp16 shows:
    an error of a logit, 2e-4 of the logits' spread, is a relative error of a probability."""
    sharp = max(1.0, spread * norm_of)
    limit = LIMIT if sharp <= 10 else min(1.0, 1e-3 * sharp)
    check(*make("turboquant_4bit_nc", "planes", 128, 2, (5, 300, 2000), scale_of=scale_of, norm_of=norm_of), 8, spread=spread, limit=limit,
          lse_limit=5e-3 * sharp)  # fmt: skip


def test_constant_values_and_zero_scale():
    pages, table, lengths = make("turboquant_4bit_nc", "slots", 128, 4, LENGTHS)
    pages.data[..., -4:-2] = 0  # every value equals its zero
    check(pages, table, lengths, 8)


def test_graph_replay_follows_its_inputs():
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 4, (700, 900, 40))
    q = torch.randn(3, 32, 128, device="cuda").half()
    out, lse = torch.empty_like(q), torch.empty(3, 32, device="cuda")
    space = space_of(pages, 8, 3)
    attend(q, pages, table, lengths, out=out, lse=lse, workspace=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(q, pages, table, lengths, out=out, lse=lse, workspace=space)
    for step in range(3):
        q.copy_(torch.randn_like(q))
        lengths.sub_(13 * step)
        out.fill_(float("nan"))
        graph.replay()
        want, _ = reference.attend(q, pages, table, lengths)
        assert error(out, want) <= LIMIT


def test_same_bits_every_time():
    pages, table, lengths = make("turboquant_4bit_nc", "slots", 128, 4, LENGTHS)
    q = torch.randn(len(LENGTHS), 32, 128, device="cuda").half()
    first, _ = attend(q, pages, table, lengths)
    for _ in range(5):
        assert bool((attend(q, pages, table, lengths)[0] == first).all())


def test_refusals():
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 2, (20,))
    q = torch.randn(1, 16, 128, device="cuda")
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        attend(q, pages, table, lengths)
    with pytest.raises(ValueError, match="int32"):
        attend(q.half(), pages, table.long(), lengths)
    with pytest.raises(ValueError, match="do not fit a cache"):
        attend(q.half()[..., :64], pages, table, lengths)
    with pytest.raises(ValueError, match="do not lie as"):
        Pages(pages.data[..., :-16], "turboquant_4bit_nc", "planes", 128, 16)
