"""Decode attention over TurboQuant pages, on a real CUDA device, against float64 attention over the decoded pages.

Every test runs over both implementations: CUDA C++ (backends/cuda/attend) and the shared Triton kernel (backends/kernels/attend).
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from backends.kernels.attend import reference  # noqa: E402
from backends.kernels.attend.pages import PRESETS, Pages  # noqa: E402
from tests.kernels import attend_cases  # noqa: E402
from tests.kernels.attend_cases import LENGTHS, LIMIT, error  # noqa: E402

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["cuda", "triton"])
def of(request):
    return attend_cases.cuda_implementation() if request.param == "cuda" else attend_cases.triton_implementation("cuda")


def make(*arguments, **options):
    return attend_cases.make("cuda", *arguments, **options)


check = attend_cases.check


@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["planes", "slots"])
@pytest.mark.parametrize("preset", list(PRESETS))
def test_ragged_batch(of, preset, layout, dim, group):
    print("error", check(of, make(preset, layout, dim, 2, LENGTHS), group))


@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("layout", ["planes", "slots"])
def test_pages_and_heads(of, layout, heads, page_tokens):
    check(of, make("turboquant_4bit_nc", layout, 128, heads, LENGTHS, page_tokens), 8 if heads < 16 else 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_and_short_together(of, dtype):
    check(of, make("turboquant_4bit_nc", "planes", 128, 4, (1, 40000, 0, 3, 0, 5000, 17)), 8, dtype)


@pytest.mark.parametrize("count", [300, 1300])
def test_many_sequences(of, count):
    check(of, make("turboquant_4bit_nc", "planes", 128, 4, tuple((i * 37) % 301 for i in range(count))), 8)


@pytest.mark.parametrize("layout", ["planes", "slots"])
def test_folded_norm(of, layout):
    check(of, make("turboquant_4bit_nc", layout, 128, 4, LENGTHS, folded=True), 8)


@pytest.mark.parametrize("options", [{"window": 100}, {"window": 16}, {"window": 1}, {"softcap": 5.0}, {"scale": 0.3}], ids=str)
def test_options(of, options):
    check(of, make("turboquant_4bit_nc", "planes", 128, 4, LENGTHS), 8, lse_limit=2e-2 if "scale" in options else 5e-3, **options)


def test_sinks(of):
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 4, LENGTHS)
    check(of, (pages, table, lengths), 8, sinks=torch.linspace(-5, 10, 32, device="cuda"))


@pytest.mark.parametrize("spread", [0.01, 8.0, 1000.0])
@pytest.mark.parametrize(("scale_of", "norm_of"), [(0.3, 1.0), (1e-4, 1.0), (300.0, 1.0), (0.3, 1e-3), (0.3, 500.0)])
def test_extremes(of, spread, scale_of, norm_of):
    """Sharp and flat softmaxes, tiny and large values and norms. Beyond logits of 10 the rounding of the queries to fp16 shows:
    an error of a logit, 2e-4 of the logits' spread, is a relative error of a probability."""
    sharp = max(1.0, spread * norm_of)
    limit = LIMIT if sharp <= 10 else min(1.0, 1e-3 * sharp)
    made = make("turboquant_4bit_nc", "planes", 128, 2, (5, 300, 2000), scale_of=scale_of, norm_of=norm_of)
    check(of, made, 8, spread=spread, limit=limit, lse_limit=5e-3 * sharp)


def test_constant_values_and_zero_scale(of):
    pages, table, lengths = make("turboquant_4bit_nc", "slots", 128, 4, LENGTHS)
    pages.data[..., -4:-2] = 0  # every value equals its zero
    check(of, (pages, table, lengths), 8)


def test_graph_replay_follows_its_inputs(of):
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 4, (700, 900, 40))
    q = torch.randn(3, 32, 128, device="cuda").half()
    out, lse = torch.empty_like(q), torch.empty(3, 32, device="cuda")
    space = of.workspace(pages, 8, 3, 0.0)
    of.attend(q, pages, table, lengths, out=out, lse=lse, workspace=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        of.attend(q, pages, table, lengths, out=out, lse=lse, workspace=space)
    for step in range(3):
        q.copy_(torch.randn_like(q))
        lengths.sub_(13 * step)
        out.fill_(float("nan"))
        graph.replay()
        want, _ = reference.attend(q, pages, table, lengths)
        assert error(out, want) <= LIMIT


def test_same_bits_every_time(of):
    pages, table, lengths = make("turboquant_4bit_nc", "slots", 128, 4, LENGTHS)
    q = torch.randn(len(LENGTHS), 32, 128, device="cuda").half()
    first, _ = of.attend(q, pages, table, lengths)
    for _ in range(5):
        assert bool((of.attend(q, pages, table, lengths)[0] == first).all())


def test_refusals(of):
    pages, table, lengths = make("turboquant_4bit_nc", "planes", 128, 2, (20,))
    q = torch.randn(1, 16, 128, device="cuda")
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        of.attend(q, pages, table, lengths)
    with pytest.raises(ValueError, match="int32"):
        of.attend(q.half(), pages, table.long(), lengths)
    with pytest.raises(ValueError, match="do not fit a cache"):
        of.attend(q.half()[..., :64], pages, table, lengths)
    with pytest.raises(ValueError, match="do not lie as"):
        Pages(pages.data[..., :-16], "turboquant_4bit_nc", "planes", 128, 16)
