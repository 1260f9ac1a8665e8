"""W10: sections that are longer or shorter than what they hold."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import SectionSize
from tests.attacks.attack import Attack, both
from tests.attacks.build import CODECS, CONTENT, GROUPS, LAYERS, MODEL, NAMES, REQUEST, RawContainer, RawSection

ERROR = SectionSize


def _shorter(raw: RawContainer, kind: int) -> None:
    """The section without its last 8 bytes."""
    section = raw.section(kind)
    packed = bytearray()
    section.pack(packed, [])
    size = section.size if section.size is not None else int.from_bytes(packed[4:8], "little")
    raw.sections[raw.sections.index(section)] = RawSection(kind, tail=bytes(packed[8 : 8 + size - 8]), layout=99)


def attacks() -> Iterator[Attack]:
    for kind in range(1, 9):
        yield from both(
            f"{NAMES[kind]} with 8 bytes more",
            lambda raw, k=kind: setattr(raw.section(k), "tail", raw.section(k).tail + bytes(8)),
            SectionSize,
        )
        yield from both(f"{NAMES[kind]} with 8 bytes fewer", lambda raw, k=kind: _shorter(raw, k), SectionSize)
        empty = RawSection(kind, layout=99)
        yield from both(f"{NAMES[kind]} empty", lambda raw, k=kind, e=empty: raw.sections.__setitem__(k - 1, e), SectionSize)
    for kind in (CONTENT, GROUPS, CODECS, LAYERS):
        for count in (0, 2):
            yield from both(f"{NAMES[kind]} counts {count}", lambda raw, k=kind, c=count: raw.section(k).head.update(count=c), SectionSize)
    for size in (0, 8, 10, 0xFFFF):
        yield from both(f"request id of {size} bytes", lambda raw, s=size: raw.section(REQUEST).head.update(name_bytes=s), SectionSize)
    yield from both(
        "model digest of 31 bytes", lambda raw: raw.sections.__setitem__(0, RawSection(MODEL, tail=bytes(31), layout=99)), SectionSize
    )
