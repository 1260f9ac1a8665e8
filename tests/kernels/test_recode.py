"""Raw payloads into slots in one pass: the slots that packing the same pages makes."""

import numpy as np
import pytest
import torch

from backends.accelerator.routes import route
from backends.kernels import plan
from backends.kernels.recode import recode_slots
from bridge.codecs import declared
from bridge.pages import PagesDoNotFit, SlotPages
from bridge.wire import Element
from tests.kernels.cases import DEVICE, EXACT, FAST, TURBOQUANT, Case, make_case
from tests.kernels.test_slots import slot_pages, slot_rows

CASES = [(64, Element.FP16, 5, 43, 32, 32), (128, Element.BF16, 3, 34, 64, 16), (256, Element.BF16, 0, 16, 64, 16)]


def both(preset: str, head_dim: int, element: Element, **shape: int) -> tuple[Case, Case]:
    """The same pages, to be sent raw and to be sent in the preset."""
    return make_case("raw", head_dim, element, **shape), make_case(preset, head_dim, element, **shape)


def recoded(
    raw: Case, case: Case, tuning: plan.Tuning, write: tuple[int, int], payload: np.ndarray
) -> tuple[list[torch.Tensor], list[int]]:
    """(poisoned pages with what was recoded, what was reported)."""
    pages, result = slot_pages(case, {}, 0xCD), plan.new_result(DEVICE)
    recode_slots(
        plan.slots_of(pages, case.codec, case.head_dim), raw.device_table(), raw.span, case.codec, raw.element, raw.heads, raw.runs(),
        torch.from_numpy(payload).to(DEVICE), raw.keys(), raw.masks(), result, tuning, write_first=write[0], write_end=write[1],
    )  # fmt: skip
    return pages, result.tolist()


@pytest.mark.parametrize("codec", TURBOQUANT)
@pytest.mark.parametrize(("head_dim", "element", "first", "end", "chunk_tokens", "block_size"), CASES)
def test_slots_are_those_of_the_reference(codec, head_dim, element, first, end, chunk_tokens, block_size) -> None:  # type: ignore[no-untyped-def]
    raw, case = both(codec, head_dim, element, layers=1, first=first, end=end, chunk_tokens=chunk_tokens, block_size=block_size)
    rows, write = slot_rows(case, case.reference_payload()), (first + 3, end - 2)
    wanted = slot_pages(case, {k: v for k, v in rows.items() if write[0] <= k[2] < write[1]}, 0xCD)
    pages, result = recoded(raw, case, EXACT, write, raw.reference_payload())
    assert all(torch.equal(a, b) for a, b in zip(pages, wanted, strict=True))
    assert result == [0, plan.NO_ORDINAL, 0]


@pytest.mark.parametrize("codec", ["turboquant_4bit_nc", "turboquant_k8v4"])
def test_fast_arithmetic_differs_at_ties_only(codec: str) -> None:
    raw, case = both(codec, 128, Element.BF16, first=0, end=48)
    rows = slot_rows(case, case.reference_payload())
    pages, result = recoded(raw, case, FAST, (0, 48), raw.reference_payload())
    wanted = slot_pages(case, rows, 0xCD)
    differing = sum(int((a != b).sum()) for a, b in zip(pages, wanted, strict=True))
    assert differing <= 3 + 2e-4 * sum(slot.size for slot in rows.values())
    assert result == [0, plan.NO_ORDINAL, 0]


def test_wrong_tags_and_dirty_padding_are_reported() -> None:
    raw, case = both("turboquant_4bit_nc", 64, Element.BF16, end=48)
    payload, spans = raw.reference_payload(), raw.spans()[0]
    payload[spans[0].offset + spans[0].run_bytes + 2 * spans[0].block_bytes - 1] ^= 0x80
    payload[spans[1].offset + 2 * spans[1].block_bytes] ^= 1
    payload[spans[1].offset + spans[1].run_bytes - 8] = 1
    _, result = recoded(raw, case, EXACT, (0, 48), payload)
    assert result == [2, spans[0].first_ordinal + spans[0].blocks + 1, 1]


def test_other_slots_are_refused() -> None:
    raw, case = both("turboquant_4bit_nc", 64, Element.BF16)
    slots = plan.slots_of(slot_pages(case, {}, 0), case.codec, 64)
    payload = torch.zeros(raw.nbytes, dtype=torch.uint8, device=DEVICE)
    for codec in (declared("turboquant_3bit_nc").for_layer(64, Element.BF16), raw.codec):
        with pytest.raises(PagesDoNotFit):
            recode_slots(
                slots, raw.device_table(), raw.span, codec, Element.BF16, 2, raw.runs(), payload, raw.keys(), raw.masks(),
                plan.new_result(DEVICE), EXACT,
            )  # fmt: skip


def way_of(pages: SlotPages, wire: str, element: Element, landing: bool = True) -> str:
    """The way of a payload of `wire`, made of pages of `element`, for one block of two kv heads."""
    case = make_case(wire, 64, element, layers=1, end=16)
    return route(pages, case.share(case.spans()[0][0]), landing).way


def test_what_goes_this_way() -> None:
    """Raw floats into slots in rows; not their packing, not regions, not another coding, not slots at odd addresses."""
    codec = declared("turboquant_4bit_nc")
    nbytes = codec.for_layer(64, Element.BF16).slot_bytes(64)
    rows = SlotPages.rows(torch.zeros((2, 16, 2, nbytes), dtype=torch.uint8), codec, 64)
    assert [way_of(rows, "raw", element) for element in (Element.BF16, Element.FP16, Element.FP32)] == ["recode"] * 3
    assert way_of(rows, "raw", Element.BF16, landing=False) == "host"
    assert way_of(rows, "turboquant_4bit_nc", Element.BF16) == "slots"
    assert way_of(rows, "fp8_e4m3", Element.BF16) == "host"
    regions = SlotPages.regions(torch.zeros((2, 32 * nbytes), dtype=torch.uint8), codec, 64, 16, 2)
    assert way_of(regions, "raw", Element.BF16) == "host"
    odd = torch.zeros(2 * 16 * 2 * nbytes + 1, dtype=torch.uint8)[1:].view(2, 16, 2, nbytes)
    assert way_of(SlotPages.rows(odd, codec, 64), "raw", Element.BF16) == "host"
