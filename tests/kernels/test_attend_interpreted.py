"""The shared decode attention kernel against float64: under Triton's interpreter in CI, on a card where there is one.

The whole matrix, over this implementation and the CUDA one, is tests/gpu/test_attend.py.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from backends.accelerator.attend import polynomial
from backends.kernels.attend import reference
from backends.kernels.attend.arguments import AttendTuning
from backends.kernels.attend.pages import PRESETS, centroids
from backends.xpu.attend import attend_tuning as intel_tuning
from tests.kernels.attend_cases import check, error, make, triton_implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TUNING = AttendTuning(tokens=32, integer_cast=True)  # the interpreter's own casts to bf16 are not exact
OF = triton_implementation(DEVICE, TUNING)
EVERY = list(product((64, 128, 256), (1, 3, 8, 16)))
# Each preset and layout once, head dims and groups by seed.
SAMPLE = [(*first, *random.Random(6 + i).choice(EVERY)) for i, first in enumerate(product(PRESETS, ("planes", "slots")))]


@pytest.mark.parametrize(("preset", "layout", "dim", "group"), SAMPLE)
def test_ragged_batch(preset, layout, dim, group):
    """Part-full pages, an empty sequence, boundaries of sequences inside a program's share."""
    heads = 2 if group == 3 else 1
    check(OF, make(DEVICE, preset, layout, dim, heads, (1, 0, 33, 70), 32), group)


@pytest.mark.parametrize("options", [{"window": 40}, {"softcap": 5.0, "scale": 0.3}, {"sinks": True}], ids=str)
def test_options(options):
    if "sinks" in options:
        options = {"sinks": torch.linspace(-5, 10, 3, device=DEVICE)}
    made = make(DEVICE, "turboquant_4bit_nc", "planes", 64, 1, (5, 0, 70))
    check(OF, made, 3, torch.bfloat16, lse_limit=2e-2 if "scale" in options else 5e-3, **options)


@pytest.mark.parametrize("layout", ["planes", "slots"])
def test_folded_norms(layout):
    check(OF, make(DEVICE, "turboquant_3bit_nc", layout, 64, 1, (70, 3), folded=True), 8)


@pytest.mark.parametrize(("spread", "scale_of", "norm_of"), [(8.0, 1e-4, 1.0), (0.01, 300.0, 1e-3)])
def test_extremes(spread, scale_of, norm_of):
    """As on the card: beyond logits of 10 the rounding of queries and centroids to fp16 shows."""
    sharp = max(1.0, spread * norm_of)
    limit = 2e-3 if sharp <= 10 else min(1.0, 1e-3 * sharp)
    made = make(DEVICE, "turboquant_4bit_nc", "planes", 64, 1, (5, 70), scale_of=scale_of, norm_of=norm_of)
    check(OF, made, 4, spread=spread, limit=limit, lse_limit=5e-3 * sharp)


def test_constant_values_and_zero_scale():
    pages, table, lengths = make(DEVICE, "turboquant_4bit_nc", "slots", 64, 1, (3, 70))
    pages.data[..., -4:-2] = 0  # every value equals its zero
    check(OF, (pages, table, lengths), 4)


def test_any_tuning_gives_the_result():
    made = make(DEVICE, "turboquant_3bit_nc", "planes", 64, 1, (70,))
    intel = replace(intel_tuning("pvc", "turboquant_3bit_nc", 64), lanes=0, large_registers=False)  # words of Intel's compiler
    for tuning in (replace(intel, taken=1), AttendTuning(tokens=64, taken=2)):
        check(triton_implementation(DEVICE, tuning), made, 2)


@pytest.mark.parametrize(("layout", "dim", "depth"), [("planes", 128, 16), ("slots", 64, 32)])
def test_shallow_products_of_fp8_keys(layout, dim, depth):
    made = make(DEVICE, "turboquant_k8v4", layout, dim, 2, (1, 0, 70))
    check(triton_implementation(DEVICE, replace(TUNING, key_depth=depth)), made, 3)


def test_same_bits_every_time():
    pages, table, lengths = make(DEVICE, "turboquant_k8v4", "planes", 64, 1, (40, 17))
    q = torch.randn(2, 4, 64, device=DEVICE).half()
    first, _ = OF.attend(q, pages, table, lengths)
    assert torch.equal(OF.attend(q, pages, table, lengths)[0], first)
    assert error(first, reference.attend(q, pages, table, lengths)[0]) <= 2e-3


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_polynomial_gives_the_code_book(dim, bits):
    levels = 1 << bits
    for code, want in enumerate(centroids(dim, bits)):
        x = (2 * code - levels + 1) / levels
        made = sum(k * x ** (2 * i + 1) for i, k in enumerate(polynomial(dim, bits)))
        assert abs(made - want * dim**0.5) < (4e-4 if bits == 4 else 1e-6)


def test_refusals():
    pages, table, lengths = make(DEVICE, "turboquant_4bit_nc", "planes", 64, 2, (20,))
    q = torch.randn(1, 8, 64, device=DEVICE).half()
    with pytest.raises(ValueError, match="too small"):
        OF.attend(q, pages, table, lengths, workspace=OF.workspace(pages, 1, 1, 0.0))
    with pytest.raises(ValueError, match="float32"):
        OF.attend(q, pages, table, lengths, lse=torch.empty(1, 8, dtype=torch.float64, device=DEVICE))
    with pytest.raises(ValueError, match="1 to 16"):
        OF.attend(torch.zeros(1, 34, 64, device=DEVICE).half(), pages, table, lengths)
