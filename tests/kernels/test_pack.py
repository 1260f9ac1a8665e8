"""pack against the reference device: equal bytes, every byte of every run written, none outside."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.kernels import plan
from backends.kernels.pack import pack_pages
from bridge.pages import PagesDoNotFit
from bridge.wire import Element, verify_tags
from tests.kernels.cases import AHEAD, CODECS, DEVICE, EXACT, FAST, KEYS, TURBOQUANT, Case, differing_codes, make_case, on_device

MARGIN = 256


def packed(case: Case, tuning: plan.Tuning) -> np.ndarray:
    """The kernel's payload; checks that nothing around it is touched."""
    buffer = torch.full((MARGIN + case.nbytes + MARGIN,), 0xCD, dtype=torch.uint8, device=DEVICE)
    pages = plan.pages_of(tensors := on_device(case.layers))
    payload = buffer[MARGIN : MARGIN + case.nbytes]
    pack_pages(
        pages, case.device_table(), case.span, case.codec, case.heads, case.runs(), payload, case.keys(), case.masks(), tuning,
        scales=case.device_scales(),
    )  # fmt: skip
    host = buffer.cpu().numpy()
    del tensors
    assert (host[:MARGIN] == 0xCD).all()
    assert (host[-MARGIN:] == 0xCD).all()
    return host[MARGIN:-MARGIN].copy()


def check_tags(case: Case, payload: np.ndarray) -> None:
    for row in case.spans():
        for span in row:
            verify_tags(payload[span.offset : span.offset + span.nbytes], span, KEYS)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "element"), [(64, Element.FP16), (128, Element.BF16), (256, Element.FP32)])
def test_equals_the_reference(codec: str, head_dim: int, element: Element) -> None:
    case = make_case(codec, head_dim, element, end=48)
    assert np.array_equal(packed(case, EXACT), case.reference_payload())


@pytest.mark.parametrize("codec", ["raw", "turboquant_k3v4_nc"])
@pytest.mark.parametrize(("first", "end", "chunk_tokens"), [(5, 9, 64), (19, 100, 32), (16, 81, 48), (63, 65, 16)])
def test_ragged_ranges(codec: str, first: int, end: int, chunk_tokens: int) -> None:
    case = make_case(codec, 64, Element.BF16, first=first, end=end, chunk_tokens=chunk_tokens, layers=1)
    assert np.array_equal(packed(case, EXACT), case.reference_payload())


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("block_size", [8, 24, 64])
def test_layouts_and_page_sizes(layout: str, block_size: int) -> None:
    case = make_case("turboquant_k8v4", 64, Element.FP16, first=3, end=90, chunk_tokens=64, block_size=block_size, layout=layout)
    assert np.array_equal(packed(case, EXACT), case.reference_payload())


@pytest.mark.parametrize("codec", TURBOQUANT[1:])
@pytest.mark.parametrize(("head_dim", "element"), [(64, Element.BF16), (128, Element.BF16), (128, Element.FP16), (256, Element.FP16)])
@pytest.mark.parametrize("tuning", [FAST, AHEAD], ids=["four blocks", "one block"])
def test_matrix_units_differ_at_ties_only(codec: str, head_dim: int, element: Element, tuning: plan.Tuning) -> None:
    case = make_case(codec, head_dim, element, first=7, end=60, chunk_tokens=128, layers=1)
    payload = packed(case, tuning)
    check_tags(case, payload)
    codes, scalars = differing_codes(payload, case.reference_payload(), case)
    vectors = case.heads * 53
    assert codes <= max(1, vectors * head_dim // 50_000)
    assert scalars <= max(1, vectors // 200)


@pytest.mark.parametrize("codec", ["fp8_e4m3", "turboquant_4bit_nc"])
@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_heads_one_after_another(codec: str, steps: int) -> None:
    """Programs that stay in a layer, that go on to the next, and a run of an odd number of blocks."""
    case = make_case(codec, 64, Element.BF16, first=5, end=40, layers=2, heads=3)
    tuning = replace(EXACT, blocks=1, steps=steps, stages=2, fill=1)
    assert tuning.steps_of(6, 3) == steps
    assert np.array_equal(packed(case, tuning), case.reference_payload())


def test_few_programs_take_fewer_steps() -> None:
    tuning = replace(EXACT, steps=4, fill=1024)
    assert [tuning.steps_of(192, others) for others in (4, 8, 16, 64)] == [1, 1, 2, 4]
    assert tuning.steps_of(6, 10_000) == 2


def test_fp8_scales() -> None:
    case = make_case("fp8_e4m3", 64, Element.BF16, scales=(0.37, 2.5), layers=1)
    assert np.array_equal(packed(case, EXACT), case.reference_payload())


def test_fp8_special_values() -> None:
    case = make_case("fp8_e4m3", 64, Element.FP32, layers=1, heads=1, end=32)
    specials = [0.0, -0.0, np.inf, -np.inf, np.nan, 448, 449, 464, 465, 1e30, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-10 * 1.0001, 3 * 2.0**-10]
    flat = case.layers[0].key.reshape(-1)
    flat[: len(specials)] = torch.tensor(specials)
    flat[64:] = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, flat.numel() - 64, dtype=np.uint32).view(np.float32))
    assert np.array_equal(packed(case, EXACT), case.reference_payload())


def test_subset_of_heads() -> None:
    case = make_case("turboquant_4bit_nc", 64, Element.BF16, heads=3, layers=1, end=32)
    pages = plan.pages_of(tensors := on_device(case.layers))
    whole = case.reference_payload()
    span = case.spans()[0][0]
    part = torch.full((2 * span.run_bytes,), 0xCD, dtype=torch.uint8, device=DEVICE)
    runs = plan.run_table([[(0, span.blocks)]], DEVICE)
    pack_pages(pages, case.device_table(), case.span, case.codec, 2, runs, part, case.keys(), case.masks(), EXACT, first_head=1)
    del tensors
    assert np.array_equal(part.cpu().numpy(), whole[span.run_bytes :])


def test_refusals() -> None:
    case = make_case("turboquant_4bit_nc", 64, Element.BF16, layers=1)
    pages = plan.pages_of(on_device(case.layers))
    payload = torch.zeros(case.nbytes, dtype=torch.uint8, device=DEVICE)
    arguments = (case.heads, case.runs(), payload, case.keys(), case.masks(), EXACT)
    with pytest.raises(PagesDoNotFit, match="does not reach"):
        pack_pages(pages, case.device_table()[:2], case.span, case.codec, *arguments)
    with pytest.raises(PagesDoNotFit, match="without conversion"):
        pack_pages(pages, case.device_table(), case.span, make_case("raw", 64, Element.FP16).codec, *arguments)
