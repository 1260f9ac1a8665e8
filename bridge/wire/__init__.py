"""The packed block format: blocks, tags, manifest, container file. Python and NumPy only; docs/wire-format.md is its specification."""

from bridge.wire.coding import BLOCK_TOKENS, Coding, CodingKind, Element, Plane, Rotation, SlotCodec
from bridge.wire.container import read_container, write_container
from bridge.wire.manifest import ContentKind, Group, GroupKind, Layer, Manifest, Shard, token_digest
from bridge.wire.payload import ChunkMap, LayerSpan, PayloadMap
from bridge.wire.sealing import open_sealed, seal
from bridge.wire.tags import TagKeys, new_key, verify_tags, write_tags

__all__ = [
    "BLOCK_TOKENS",
    "ChunkMap",
    "Coding",
    "CodingKind",
    "ContentKind",
    "Element",
    "Group",
    "GroupKind",
    "Layer",
    "LayerSpan",
    "Manifest",
    "PayloadMap",
    "Plane",
    "Rotation",
    "Shard",
    "SlotCodec",
    "TagKeys",
    "new_key",
    "open_sealed",
    "read_container",
    "seal",
    "token_digest",
    "verify_tags",
    "write_container",
    "write_tags",
]
