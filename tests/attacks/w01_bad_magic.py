"""W01: files of other formats, and this one's with a damaged magic."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from bridge.wire.errors import BadMagic
from tests.attacks.attack import Attack, both

ERROR = BadMagic


def attacks() -> Iterator[Attack]:
    for name, magic in (("lower case", b"kvbridge"), ("zeros", bytes(8)), ("KVB1", b"KVB1\0\0\0\0"), ("one bit", b"KVBRIDGD")):
        yield from both(f"manifest of {name}", lambda raw, m=magic: setattr(raw, "magic", m), BadMagic, left=BadMagic)
        yield from both(f"file of {name}", lambda raw, m=magic: setattr(raw, "file_magic", m), BadMagic, left=BadMagic)
    for name, data in (
        ("pickle", pickle.dumps([0] * 99)),
        ("gguf", b"GGUF\3" + bytes(99)),
        ("safetensors", b"\x40" + bytes(7) + b"{" * 99),
    ):
        yield Attack(name, data, BadMagic, False)
