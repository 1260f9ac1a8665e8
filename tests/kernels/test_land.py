"""land against the reference device: equal elements in the tokens asked for, nothing outside, wrong tags and dirty padding reported."""

import numpy as np
import pytest
import torch

from backends.cpu import reference
from backends.kernels import plan
from backends.kernels.land import land_pages
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.wire import Element, write_tags
from tests.kernels.cases import CODECS, DEVICE, DTYPES, EXACT, FAST, KEYS, SINGLE, TURBOQUANT, Case, make_case, on_device

POISON = -7.0


def blank(case: Case, element: Element) -> list[LayerPages]:
    """Pages of the case's shape and strides, poisoned."""
    made = []
    for layer in case.layers:
        sides = []
        for side in (layer.key, layer.value):
            page = torch.empty_strided(side.shape, side.stride(), dtype=DTYPES[element])
            page.fill_(POISON)
            sides.append(page)
        made.append(LayerPages(*sides))
    return made


def landed(case: Case, payload: np.ndarray, tuning: plan.Tuning, element: Element, first: int, end: int) -> tuple[list, list[int]]:
    tensors = on_device(blank(case, element))
    result = plan.new_result(DEVICE)
    land_pages(
        plan.pages_of(tensors), case.device_table(), case.span, case.codec, case.heads, case.runs(),
        torch.from_numpy(payload.copy()).to(DEVICE), case.keys(), case.masks(), result, tuning,
        write_first=first, write_end=end, scales=case.device_scales(),
    )  # fmt: skip
    return [(key.cpu(), value.cpu()) for key, value in tensors], result.tolist()


def expected(case: Case, payload: np.ndarray, element: Element, first: int, end: int) -> list:
    layers = blank(case, element)
    for row in case.spans():
        for span in row:
            table = BlockTable(case.table, case.block_size)
            reference.land_share(PagedCache(dict(enumerate(layers))), table, case.share(span), KEYS, payload, first, end)
    return [(layer.key, layer.value) for layer in layers]


def words(side: torch.Tensor) -> torch.Tensor:
    return side.contiguous().view(torch.int32 if side.element_size() == 4 else torch.int16)


def differing(a: list, b: list) -> int:
    return sum(int((words(x) != words(y)).sum()) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("head_dim", "element"), [(64, Element.FP16), (128, Element.BF16), (256, Element.FP32)])
def test_equals_the_reference(codec: str, head_dim: int, element: Element) -> None:
    case = make_case(codec, head_dim, element, end=40, layers=1)
    payload = case.reference_payload()
    pages, result = landed(case, payload, EXACT, element, 0, 40)
    assert result == [0, plan.NO_ORDINAL, 0]
    assert differing(pages, expected(case, payload, element, 0, 40)) == 0


@pytest.mark.parametrize("codec", ["raw", "turboquant_3bit_nc"])
@pytest.mark.parametrize(("first", "end", "chunk_tokens", "write"), [(5, 9, 64, (0, 99)), (19, 100, 32, (48, 90)), (16, 81, 48, (30, 31))])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_ragged_ranges_and_masked_writes(codec: str, first: int, end: int, chunk_tokens: int, write: tuple, layout: str) -> None:
    case = make_case(codec, 64, Element.BF16, first=first, end=end, chunk_tokens=chunk_tokens, layers=1, layout=layout, block_size=24)
    payload = case.reference_payload()
    pages, result = landed(case, payload, EXACT, Element.BF16, *write)
    assert result == [0, plan.NO_ORDINAL, 0]
    assert differing(pages, expected(case, payload, Element.BF16, *write)) == 0


@pytest.mark.parametrize("codec", TURBOQUANT)
@pytest.mark.parametrize(("head_dim", "element"), [(64, Element.BF16), (128, Element.BF16), (128, Element.FP16), (256, Element.BF16)])
@pytest.mark.parametrize("tuning", [FAST, SINGLE], ids=["four blocks", "one block"])
def test_matrix_units_differ_at_ties_only(codec: str, head_dim: int, element: Element, tuning: plan.Tuning) -> None:
    case = make_case(codec, head_dim, element, first=3, end=60, chunk_tokens=128, layers=1)
    payload = case.reference_payload()
    pages, result = landed(case, payload, tuning, element, 0, 60)
    wanted = expected(case, payload, element, 0, 60)
    assert result == [0, plan.NO_ORDINAL, 0]
    assert differing(pages, wanted) <= case.heads * 57 * head_dim // (500 if element is Element.FP16 else 2000)
    # A difference is a step of one unit in the last place, or, where a sum nearly cancels, of the vector's own rounding.
    left, right = pages[0][0].float(), wanted[0][0].float()
    ulp = right.abs() * (2.0**-10 if element is Element.FP16 else 2.0**-7)
    assert ((left - right).abs() <= ulp + 1e-6 * right.norm(dim=-1, keepdim=True)).all()
    assert differing([(pages[0][1], pages[0][1])], [(wanted[0][1], wanted[0][1])]) == 0


def test_other_element_than_packed() -> None:
    case = make_case("turboquant_4bit_nc", 64, Element.BF16, end=32, layers=1)
    payload = case.reference_payload()
    pages, _ = landed(case, payload, EXACT, Element.FP32, 0, 32)
    assert differing(pages, expected(case, payload, Element.FP32, 0, 32)) == 0


def test_fp8_scales() -> None:
    case = make_case("fp8_e4m3", 64, Element.BF16, scales=(0.37, 2.5), layers=1, end=32)
    payload = case.reference_payload()
    pages, _ = landed(case, payload, EXACT, Element.BF16, 0, 32)
    assert differing(pages, expected(case, payload, Element.BF16, 0, 32)) == 0


@pytest.mark.parametrize("codec", ["raw", "turboquant_4bit_nc", "turboquant_k3v4_nc"])
@pytest.mark.parametrize("place", ["codes", "last scalar", "tag"])
def test_wrong_tag_is_reported(codec: str, place: str) -> None:
    case = make_case(codec, 64, Element.BF16, first=0, end=70, chunk_tokens=32, layers=2)
    payload = case.reference_payload()
    span = case.spans()[1][1]
    block = 1
    run = span.offset + 1 * span.run_bytes
    at = {
        "codes": run + block * span.block_bytes + 5,
        "last scalar": run + (block + 1) * span.block_bytes - 1,
        "tag": run + span.blocks * span.block_bytes + 8 * block + 7,
    }[place]
    payload[at] ^= 0x80
    _, result = landed(case, payload, FAST, Element.BF16, 0, 70)
    assert result == [1, span.first_ordinal + span.blocks + block, 0]


@pytest.mark.parametrize("codec", ["raw", "turboquant_4bit_nc"])
@pytest.mark.parametrize("tuning", [EXACT, SINGLE], ids=["two blocks", "one block"])
def test_dirty_padding_is_reported(codec: str, tuning: plan.Tuning) -> None:
    """Of each run with an odd number of blocks; the blocks themselves are whole."""
    case = make_case(codec, 64, Element.BF16, end=48, layers=2)
    payload = case.reference_payload()
    spans = case.spans()[0]
    for span, head in ((spans[0], 1), (spans[1], 0)):
        payload[span.offset + (head + 1) * span.run_bytes - 8] = 1
    _, result = landed(case, payload, tuning, Element.BF16, 0, 48)
    assert result == [0, plan.NO_ORDINAL, 2]


@pytest.mark.parametrize("codec", ["raw", "turboquant_4bit_nc"])
def test_rows_that_are_not_valid_are_not_written(codec: str) -> None:
    """Tags may be right over rows outside the valid range that are not zero: those stay outside the pages, as in the reference."""
    case = make_case(codec, 64, Element.BF16, first=5, end=27, layers=1)
    payload = case.reference_payload()
    span = case.spans()[0][0]
    key_row = case.codec.planes(64)[0].row_bytes
    payload[span.offset : span.offset + key_row] = 0x31
    write_tags(payload[span.offset : span.offset + span.nbytes], span, KEYS)
    pages, result = landed(case, payload, EXACT, Element.BF16, 0, 99)
    assert result == [0, plan.NO_ORDINAL, 0]
    assert differing(pages, expected(case, payload, Element.BF16, 0, 99)) == 0


@pytest.mark.parametrize("codec", ["fp8_e4m3", "turboquant_k8v4", "turboquant_4bit_nc"])
def test_fp8_pages(codec: str) -> None:
    from bridge.codecs.fp8 import encode_e4m3

    case = make_case(codec, 64, Element.BF16, end=32, layers=1)
    payload = case.reference_payload()
    tensors = [tuple(torch.full(side.shape, 0xCD, dtype=torch.uint8, device=DEVICE) for side in (case.layers[0].key, case.layers[0].value))]
    result = plan.new_result(DEVICE)
    land_pages(
        plan.pages_of(tensors), case.device_table(), case.span, case.codec, case.heads, case.runs(),
        torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, EXACT,
    )  # fmt: skip
    wanted = expected(case, payload, Element.FP32, 0, 32)
    used = case.table[:2]
    for got, want in zip(tensors[0], wanted[0], strict=True):
        host = got.cpu().numpy()
        assert np.array_equal(host[used], encode_e4m3(want.numpy()[used]))
        unused = [page for page in range(case.num_pages) if page not in case.table]
        assert (host[unused] == 0xCD).all()
    assert result.tolist() == [0, plan.NO_ORDINAL, 0]
