"""Every kernel as it ships for Intel GPUs: the configurations, and the launch of each as a device makes it. For `native.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

DEVICES = ("pvc", "dg2")
HEAD_DIMS = (64, 128, 256)
TURBOQUANT = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
CODECS = ("raw", "fp8_e4m3", *TURBOQUANT)
ELEMENTS = ("BF16", "FP16", "FP32")
ATTEND = ("attend", "attend_slots")
MERGES = TURBOQUANT[:2]  # of either kind of keys: the merge takes their tuning, and nothing else of a preset
_HEADS, _BLOCK = 2, 16


@dataclass(frozen=True)
class Configuration:
    """One kernel as it ships: what is compiled for it follows from the tuning of its architecture.

    codec: the kernels of tags and masks know none. element: of the pages; for "recode", which lands raw elements in slots, of the payload;
    for `attend` of the queries. variant: "scaled" has scales other than 1 for fp8 keys and values, of the payload or of the pages. Of
    `attend`, for 4 query heads a kv head and up to 128 sequences: "options" has a window, a soft cap and sinks, for up to 4,096 sequences;
    "folded" has folded norms, and one query head.
    """

    device: str
    operation: str
    codec: str = ""
    head_dim: int = 0
    element: str = "BF16"
    variant: str = ""

    @property
    def keeps_scratch(self) -> bool:
        """Whether it is known that registers go to scratch memory: no launch parameters were found without."""
        if self.codec == TURBOQUANT[0] or self.head_dim == 0:
            return False
        if self.operation in ATTEND:
            return self.head_dim == 256
        if self.device == "dg2" and self.operation == "recode":
            return self.element == "FP32"
        return self.device == "dg2" and (self.operation, self.codec, self.head_dim, self.element) == ("land", "raw", 256, "FP32")

    def __str__(self) -> str:
        if not self.codec:
            return f"{self.device} {self.operation}"
        return " ".join(str(part) for part in (self.device, self.operation, self.codec, self.head_dim, self.element, self.variant) if part)


def configurations() -> list[Configuration]:
    """Every shipped one that ocloc can build."""
    made: list[tuple[Any, ...]] = [*product(DEVICES, ("pack", "land"), CODECS, HEAD_DIMS, ELEMENTS)]
    made += product(DEVICES, ("pack", "land"), ("fp8_e4m3", "turboquant_k8v4"), HEAD_DIMS, ("BF16",), ("scaled",))
    made += product(DEVICES, ("land",), ("fp8_e4m3", *TURBOQUANT), HEAD_DIMS, ("E4M3FN",), ("", "scaled"))
    made += product(DEVICES, ("pack_slots", "land_slots"), TURBOQUANT, HEAD_DIMS)
    made += product(DEVICES, ("recode",), TURBOQUANT, HEAD_DIMS, ELEMENTS)
    made += product(DEVICES, ("make_tags", "verify_tags", "make_masks"))
    made += product(DEVICES, ATTEND, TURBOQUANT, HEAD_DIMS, ("BF16",))
    made += product(DEVICES, ATTEND, TURBOQUANT, HEAD_DIMS, ("FP16",), ("options",))
    made += product(DEVICES, ATTEND, TURBOQUANT[1:], HEAD_DIMS, ("BF16",), ("folded",))
    made += product(DEVICES, ("attend_merge",), MERGES, HEAD_DIMS, ("BF16",))
    made += product(DEVICES, ("attend_merge",), MERGES, HEAD_DIMS, ("FP16",), ("options",))
    return [Configuration(*parts) for parts in made]


@dataclass(frozen=True)
class Launched:
    """What was launched. moved: bytes that one program moves, 0 where they are not known. matrix: matrix instructions are claimed."""

    kernel: str
    warps: int
    moved: int = 0
    matrix: bool = False


def kernels() -> tuple[Any, ...]:
    """All of them. Only where Triton is."""
    from backends.accelerator import masks, tags
    from backends.kernels import land, pack, recode, slots
    from backends.kernels.attend.kernels import merge_kernel, pages_kernel

    moving = pack.pack_kernel, land.land_kernel, slots.slots_kernel, recode.recode_kernel
    return *moving, tags.tags_kernel, masks.masks_kernel, pages_kernel, merge_kernel


def launch(configuration: Configuration) -> Launched:
    """Calls the launch function as a device does, with an argument of each kind in the CPU's memory."""
    import torch

    if configuration.operation in (*ATTEND, "attend_merge"):
        return _attend(configuration)
    if configuration.operation == "make_masks":
        from backends.accelerator.masks import launch_masks
        from backends.xpu.tuning import MASK_OPTIONS

        launch_masks(torch.zeros(1 << 14, dtype=torch.int64), 0, 8, 1, 8, MASK_OPTIONS)
        return Launched("masks_kernel", MASK_OPTIONS["num_warps"])
    if not configuration.codec:
        from backends.accelerator.tags import launch_tags
        from backends.xpu.tuning import TAG_OPTIONS

        words = torch.zeros(1 << 14, dtype=torch.int64)
        launch_tags(torch.zeros(1 << 14, dtype=torch.uint8), words, words, 0, 1, 8, configuration.operation == "make_tags", TAG_OPTIONS)
        return Launched("tags_kernel", TAG_OPTIONS["num_warps"])
    return _coded(configuration)


def _coded(configuration: Configuration) -> Launched:
    """What moves pages or slots to a payload or from one."""
    import torch

    from backends.kernels import plan
    from backends.kernels.land import land_pages
    from backends.kernels.pack import pack_pages
    from backends.kernels.recode import recode_slots
    from backends.kernels.slots import land_slots, pack_slots
    from backends.xpu.tuning import tuning_for
    from bridge.codecs import declared
    from bridge.wire import Element

    words = torch.zeros(1 << 14, dtype=torch.int64)
    element, dim = Element[configuration.element], configuration.head_dim
    codec = declared(configuration.codec).for_layer(dim, Element.BF16 if element is Element.E4M3FN else element)
    operation = "pack" if configuration.operation == "recode" else configuration.operation  # whose arithmetic it is
    tuning = tuning_for(configuration.device)(operation, codec, dim)
    span = plan.Span(0, 64, 1 << 20)
    payload = torch.zeros(_HEADS * 5 * codec.block_bytes(dim), dtype=torch.uint8)
    shared = (torch.zeros(4, dtype=torch.int32), span, codec, _HEADS, torch.zeros((1, 1, 2), dtype=torch.int64), payload, words, words)
    if configuration.operation == "recode":
        slots = plan.slots_of([torch.zeros((4, _BLOCK, _HEADS, codec.slot_bytes(dim)), dtype=torch.uint8)], codec, dim)
        raw = torch.zeros(_HEADS * 5 * 16 * 2 * dim * 4, dtype=torch.uint8)
        recode_slots(slots, shared[0], span, codec, element, _HEADS, shared[4], raw, words, words, words[:3], tuning)
        return Launched("recode_kernel", tuning.warps, 16 * 2 * dim * (element.bits // 8) + codec.block_bytes(dim), tuning.matrix)
    if configuration.operation.endswith("_slots"):
        slots = plan.slots_of([torch.zeros((4, _BLOCK, _HEADS, codec.slot_bytes(dim)), dtype=torch.uint8)], codec, dim)
        if configuration.operation == "pack_slots":
            pack_slots(slots, *shared, tuning)
        else:
            land_slots(slots, *shared, words[:3], tuning)
        return Launched("slots_kernel", tuning.warps, tuning.blocks * 2 * codec.block_bytes(dim), tuning.matrix)
    types = {Element.BF16: torch.bfloat16, Element.FP16: torch.float16, Element.FP32: torch.float32, Element.E4M3FN: torch.uint8}
    dtype = types[element]
    side = torch.zeros((4, _BLOCK, _HEADS, dim), dtype=dtype)
    pages = plan.pages_of([(side, side.clone())])
    factors = torch.ones((1, 2))
    scaled = configuration.variant == "scaled"
    scales = factors if scaled and codec.key.scaled else None
    if configuration.operation == "pack":
        pack_pages(pages, *shared, tuning, scales=scales)
    else:
        on_pages = factors if scaled and element is Element.E4M3FN else None
        land_pages(pages, *shared, words[:3], tuning, scales=scales, page_scales=on_pages)
    moved = tuning.blocks * (codec.block_bytes(dim) + 16 * 2 * dim * dtype.itemsize)
    return Launched(f"{configuration.operation}_kernel", tuning.warps, moved, tuning.matrix)


def _attend(configuration: Configuration) -> Launched:
    """Both kernels of `attend`. Bytes are those of one tile: a program that reads more repeats a part of its instructions."""
    import torch

    from backends.accelerator.attend import attend
    from backends.kernels.attend.arguments import MAX_BATCH
    from backends.kernels.attend.pages import Pages, slot_bytes
    from backends.xpu.attend import attend_tuning

    preset, dim, options = configuration.codec, configuration.head_dim, configuration.variant == "options"
    tuning = attend_tuning(configuration.device, preset, dim)
    slot, folded = slot_bytes(preset, dim), configuration.variant == "folded"
    layout = "slots" if configuration.operation == "attend_slots" else "planes"
    data = torch.zeros((4, _BLOCK, _HEADS, slot) if layout == "slots" else (4, _HEADS, _BLOCK * slot), dtype=torch.uint8)
    batch, group = MAX_BATCH if options else 3, 1 if folded else 4
    queries = torch.zeros(batch, _HEADS * group, dim, dtype={"BF16": torch.bfloat16, "FP16": torch.float16}[configuration.element])
    attend(
        queries, Pages(data, preset, layout, dim, _BLOCK, folded), torch.zeros((batch, 9), dtype=torch.int32),
        torch.ones(batch, dtype=torch.int32), tuning=tuning, softcap=30.0 if options else 0.0, window=100 if options else 0,
        sinks=torch.zeros(_HEADS * group) if options else None,
    )  # fmt: skip
    if configuration.operation == "attend_merge":
        return Launched("merge_kernel", tuning.merge_warps)
    return Launched("pages_kernel", tuning.warps, tuning.tokens * slot)
