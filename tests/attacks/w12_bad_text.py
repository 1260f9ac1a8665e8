"""W12: request ids that are empty, too long, or bytes that two readers could take for different text."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.wire.errors import BadText
from tests.attacks.attack import Attack, both
from tests.attacks.build import RawContainer

ERROR = BadText

TEXTS = {
    "empty": b"",
    "257 bytes": b"x" * 257,
    "65,535 bytes": b"x" * 65535,
    "129 characters in 258 bytes": "é".encode() * 129,
    "a stray continuation": b"abc\x80",
    "a cut character": b"abc\xe2\x82",
    "an overlong slash": b"\xc0\xaf",
    "an overlong zero": b"\xc0\x80",
    "a surrogate": b"\xed\xa0\x80",
    "past U+10FFFF": b"\xf4\x90\x80\x80",
    "latin-1": "é".encode("latin-1"),
}


def _rename(raw: RawContainer, text: bytes) -> None:
    raw.request["name_bytes"] = len(text)
    raw.sections[2].tail = text


def attacks() -> Iterator[Attack]:
    for name, text in TEXTS.items():
        yield from both(name, lambda raw, t=text: _rename(raw, t), BadText)
