"""vLLM slots: byte equal to the golden slots' layout, both ways, with tags."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from backends.kernels import plan
from backends.kernels.page_order import in_page_order, pieces
from backends.kernels.slots import land_slots, pack_slots
from bridge.pages import PagesDoNotFit
from bridge.wire import Element
from tests.kernels.cases import DEVICE, EXACT, SINGLE, TURBOQUANT, Case, make_case

TOGETHER = replace(SINGLE, together=1)
"""All kv heads in one program, where that can be."""


def slot_rows(case: Case, payload: np.ndarray) -> dict[tuple[int, int, int], np.ndarray]:
    """(layer, head, token) -> the slot's bytes, from the planes of a payload: K codes, K scalars, V codes, V scalars."""
    planes = case.codec.planes(case.head_dim)
    found = {}
    for row in case.spans():
        for span in row:
            for head in range(span.heads):
                for block in range(span.blocks):
                    at = span.offset + head * span.run_bytes + block * span.block_bytes
                    for r in range(*span.valid_range(block)):
                        parts = [payload[at + p.offset + r * p.row_bytes :][: p.row_bytes] for p in planes]
                        slot = np.concatenate([parts[0], parts[2], parts[1], parts[3]])
                        found[span.layer, head, (span.first_block + block) * 16 + r] = slot
    return found


def slot_pages(case: Case, rows: dict, fill: int) -> list[torch.Tensor]:
    shape = (case.num_pages, case.block_size, case.heads, case.codec.slot_bytes(case.head_dim))
    pages = [np.full(shape, fill, np.uint8) for _ in case.layers]
    for (layer, head, token), slot in rows.items():
        pages[layer][case.table[token // case.block_size], token % case.block_size, head] = slot
    return [torch.from_numpy(page).to(DEVICE) for page in pages]


CASES = [(64, 0, 16, 64, 16), (128, 5, 43, 32, 32), (256, 19, 34, 64, 16)]


@pytest.mark.parametrize("codec", TURBOQUANT)
@pytest.mark.parametrize(("head_dim", "first", "end", "chunk_tokens", "block_size"), CASES)
def test_both_ways(codec: str, head_dim: int, first: int, end: int, chunk_tokens: int, block_size: int) -> None:
    case = make_case(codec, head_dim, Element.BF16, first=first, end=end, chunk_tokens=chunk_tokens, block_size=block_size)
    payload = case.reference_payload()
    rows = slot_rows(case, payload)
    arguments = (case.device_table(), case.span, case.codec, case.heads, case.runs())

    filled = slot_pages(case, rows, 0xEE)
    out = torch.full((case.nbytes,), 0xCD, dtype=torch.uint8, device=DEVICE)
    pack_slots(plan.slots_of(filled, case.codec, head_dim), *arguments, out, case.keys(), case.masks(), EXACT)
    assert np.array_equal(out.cpu().numpy(), payload)

    write = (first + 3, end - 2)
    wanted = slot_pages(case, {k: v for k, v in rows.items() if write[0] <= k[2] < write[1]}, 0xCD)
    for tuning in (SINGLE, TOGETHER):
        blank = slot_pages(case, {}, 0xCD)
        result = plan.new_result(DEVICE)
        slots = plan.slots_of(blank, case.codec, head_dim)
        assert in_page_order(slots, case.span, case.codec, case.heads)
        land_slots(
            slots, *arguments, torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, tuning,
            write_first=write[0], write_end=write[1],
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(blank, wanted, strict=True))
        assert result.tolist() == [0, plan.NO_ORDINAL, 0]


@pytest.mark.parametrize("tuning", [EXACT, TOGETHER], ids=["two blocks", "all heads"])
@pytest.mark.parametrize("place", [1, -1, -9], ids=["first byte", "last byte", "last but eight"])
def test_wrong_tag_is_reported(tuning: plan.Tuning, place: int) -> None:
    """Of the least block of two that are wrong, in the second layer: of its first head and of its second."""
    case = make_case("turboquant_3bit_nc", 64, Element.BF16, end=64)
    payload = case.reference_payload()
    span = case.spans()[0][1]
    for at in (span.offset + 2 * span.block_bytes, span.offset + span.run_bytes + span.block_bytes):
        payload[at + place % span.block_bytes] ^= 1
    result = plan.new_result(DEVICE)
    land_slots(
        plan.slots_of(slot_pages(case, {}, 0), case.codec, 64), case.device_table(), case.span, case.codec, case.heads, case.runs(),
        torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, tuning,
    )  # fmt: skip
    assert result.tolist() == [2, span.first_ordinal + 2, 0]


@pytest.mark.parametrize("codec", ["turboquant_k8v4", "turboquant_3bit_nc"])
@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("together", [0, 1])
def test_slots_at_any_even_address(codec: str, heads: int, shift: int, together: int) -> None:
    """Slots that begin on multiples of 4 bytes, between them, and by turns; tokens that end within a word."""
    case = make_case(codec, 64, Element.BF16, first=3, end=30, layers=1, heads=heads)
    payload = case.reference_payload()
    slot, shape = case.codec.slot_bytes(64), (case.num_pages, case.block_size, heads)
    room = torch.full((case.num_pages * case.block_size * heads * slot + 16,), 0xCD, dtype=torch.uint8, device=DEVICE)
    pages = room[shift : shift + room.numel() - 16].view(*shape, slot)
    result = plan.new_result(DEVICE)
    land_slots(
        plan.slots_of([pages], case.codec, 64), case.device_table(), case.span, case.codec, heads, case.runs(),
        torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, replace(SINGLE, together=together),
    )  # fmt: skip
    assert torch.equal(pages, slot_pages(case, slot_rows(case, payload), 0xCD)[0])
    assert (room[:shift] == 0xCD).all()
    assert (room[pages.numel() + shift :] == 0xCD).all()
    assert result.tolist() == [0, plan.NO_ORDINAL, 0]


@pytest.mark.parametrize("tuning", [EXACT, SINGLE, TOGETHER], ids=["two blocks", "one block", "all heads"])
def test_dirty_padding_is_reported(tuning: plan.Tuning) -> None:
    """Of each run with an odd number of blocks; the blocks themselves are whole."""
    case = make_case("turboquant_4bit_nc", 64, Element.BF16, end=48, layers=2, heads=2)
    payload = case.reference_payload()
    spans = case.spans()[0]
    for span, head in ((spans[0], 1), (spans[1], 0)):
        payload[span.offset + (head + 1) * span.run_bytes - 8] = 1
    result = plan.new_result(DEVICE)
    land_slots(
        plan.slots_of(slot_pages(case, {}, 0), case.codec, 64), case.device_table(), case.span, case.codec, case.heads, case.runs(),
        torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, tuning,
    )  # fmt: skip
    assert result.tolist() == [0, plan.NO_ORDINAL, 2]


def test_some_of_the_pages_heads() -> None:
    """Two of four kv heads, as of one TP rank of two: no stretch of a page, so one head a program."""
    case = make_case("turboquant_3bit_nc", 64, Element.BF16, end=30, layers=1)
    payload = case.reference_payload()
    pages = torch.full((case.num_pages, case.block_size, 4, case.codec.slot_bytes(64)), 0xCD, dtype=torch.uint8, device=DEVICE)
    slots, result = plan.slots_of([pages], case.codec, 64), plan.new_result(DEVICE)
    assert not in_page_order(slots, case.span, case.codec, 2)
    land_slots(
        slots, case.device_table(), case.span, case.codec, 2, case.runs(),
        torch.from_numpy(payload).to(DEVICE), case.keys(), case.masks(), result, TOGETHER, first_head=1,
    )  # fmt: skip
    assert torch.equal(pages[:, :, 1:3], slot_pages(case, slot_rows(case, payload), 0xCD)[0])
    assert (pages[:, :, (0, 3)] == 0xCD).all()
    assert result.tolist() == [0, plan.NO_ORDINAL, 0]


def test_pieces_cover_a_blocks_slots() -> None:
    for words in range(8, 20000, 4):
        found = pieces(words)
        held = [size for size in found if size]
        assert all(size & (size - 1) == 0 for size in held)
        assert sum(held[:-1]) < words <= sum(held)
        assert sum(held) <= words + max(64, words // 6)


def test_other_presets_are_refused() -> None:
    case, other = (make_case(name, 64, Element.BF16) for name in ("turboquant_4bit_nc", "turboquant_3bit_nc"))
    slots = plan.slots_of(slot_pages(other, {}, 0), other.codec, 64)
    payload = torch.zeros(case.nbytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(PagesDoNotFit, match="bytes"):
        pack_slots(slots, case.device_table(), case.span, case.codec, case.heads, case.runs(), payload, case.keys(), case.masks(), EXACT)
