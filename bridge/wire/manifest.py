"""The manifest: everything needed to read a payload without guessing, and the rules that its fields obey."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from bridge.wire import errors
from bridge.wire.alike import OfLayers
from bridge.wire.coding import BLOCK_TOKENS, CodingKind, Element, SlotCodec

MAJOR, MINOR = 0, 1

MAX_MANIFEST_BYTES = 1 << 20
MAX_SECTIONS = 64
MAX_REQUEST_ID_BYTES = 256
MAX_CONTENT_DIGESTS = 16
MAX_GROUPS = 64
MAX_CODECS = 64
MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_TOKENS = 1 << 24
MAX_CHUNK_TOKENS = 1 << 16
MAX_RANKS = 4096
MAX_BLOCKS = 1 << 34
"""Blocks of one payload; as many masks as lie before the hash keys in the key stream."""


class ContentKind(IntEnum):
    """What the tokens' KV depends on besides the model: the parts of an engine's prefix hash, each as a SHA-256 digest."""

    TOKENS = 1
    LORA = 2
    MULTIMODAL = 3
    PROMPT_EMBEDDINGS = 4
    CACHE_SALT = 5


class GroupKind(IntEnum):
    """How a group's token range is to be understood."""

    FULL_ATTENTION = 1
    """The KV of every token of the range."""
    SLIDING_WINDOW = 2
    """The KV of the last tokens; `window` of them are looked back at."""
    LATENT = 3
    """One vector a token (MLA): the key side only."""
    STATE = 4
    """No tokens: one state after the payload's last token. The range is the one whole block that holds this token, and its sixteen rows
    are sixteenths of the state."""


@dataclass(frozen=True)
class Group:
    """Layers that share a token range and head geometry.

    heads: kv heads of the model's layer. head_first, head_count: those that this payload carries. Tokens [first_token, end_token).
    window: of a SLIDING_WINDOW group, 0 otherwise.
    """

    heads: int
    head_dim: int
    first_token: int
    end_token: int
    head_first: int = 0
    head_count: int = 0
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window: int = 0

    def __post_init__(self) -> None:
        if self.head_count == 0:
            object.__setattr__(self, "head_count", self.heads - self.head_first)


@dataclass(frozen=True)
class Layer:
    """One layer of the payload. index: its number in the model. group, codec: positions in the manifest's tables.

    key_scale, value_scale: what a decoded fp8 element is multiplied with; 1 where the coding has no scale (rounded to fp32 on the wire).
    source: the element type that the codes were made from, as far as it is known; it bounds what a decoder may expect of them.
    """

    index: int
    group: int
    codec: int
    key_scale: float = 1.0
    value_scale: float = 1.0
    source: Element = Element.NONE


@dataclass(frozen=True)
class Shard:
    """Which rank of the prefiller packed this payload."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1


@dataclass(frozen=True)
class Manifest:
    """See docs/wire-format.md, section 3. `sealing.seal` turns it into bytes, `sealing.open_sealed` reads it."""

    model_digest: bytes
    content: tuple[tuple[ContentKind, bytes], ...]
    request_id: str
    lease: int
    generation: int
    chunk_tokens: int
    groups: tuple[Group, ...]
    codecs: tuple[SlotCodec, ...]
    layers: tuple[Layer, ...]
    shard: Shard = field(default_factory=Shard)
    minor: int = MINOR

    @property
    def first_token(self) -> int:
        """First token of any group: where the payload's chunks begin."""
        return min(group.first_token for group in self.groups)

    @property
    def end_token(self) -> int:
        """One past the last token of any group, a state's whole block included: where the payload's chunks end."""
        return max(group.end_token for group in self.groups)

    def check(self) -> None:
        """Raises the WireError of the first clause that this manifest breaks."""
        _check(self)


def token_digest(token_ids: list[int]) -> bytes:
    """SHA-256 over the token ids as little-endian u32: the content's identity, as engines hash prefixes. Raises BadContent for others."""
    try:
        return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
    except struct.error:
        raise errors.BadContent("a token id is no whole number from 0 to 4294967295", remedy="compare both sides' tokenizers") from None


def bounded(value: int, low: int, high: int, error: type[errors.WireError], what: str) -> None:
    """Raises `error`, naming `what`, unless `value` is a whole number and low <= value <= high."""
    if type(value) is not int and not hasattr(value, "__index__"):
        raise error(f"{what} is {value!r}, not a whole number")
    if not low <= value <= high:
        raise error(f"{what} is {value}, outside {low} to {high}")


def _as_fp32(value: float) -> float:
    """The value that stands in the bytes: too large is infinite, too small is zero."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.inf


def _check(m: Manifest) -> None:
    bounded(len(m.model_digest), 32, 32, errors.BadContent, "the length of the model digest")
    bounded(len(m.content), 1, MAX_CONTENT_DIGESTS, errors.BadContent, "the number of content digests")
    kinds = [kind for kind, _ in m.content]
    if kinds != sorted(set(kinds)) or kinds[0] is not ContentKind.TOKENS:
        raise errors.BadContent("content digests must ascend, be unique and begin with the tokens'")
    for kind, digest in m.content:
        bounded(len(digest), 32, 32, errors.BadContent, f"the length of the digest of {kind.name}")
    try:
        name = m.request_id.encode()
    except UnicodeEncodeError:
        raise errors.BadText("the request id holds characters that UTF-8 does not have") from None
    bounded(len(name), 1, MAX_REQUEST_ID_BYTES, errors.BadText, "the length of the request id in bytes")
    bounded(m.minor, 0, 2**16 - 1, errors.UnsupportedVersion, "the minor version")
    bounded(m.lease, 0, 2**64 - 1, errors.TooLarge, "the lease")
    bounded(m.generation, 0, 2**32 - 1, errors.TooLarge, "the generation")
    for rank, size, what in ((m.shard.tp_rank, m.shard.tp_size, "TP"), (m.shard.pp_rank, m.shard.pp_size, "PP")):
        bounded(size, 1, MAX_RANKS, errors.BadShard, f"the {what} size")
        bounded(rank, 0, size - 1, errors.BadShard, f"the {what} rank")
    bounded(m.chunk_tokens, BLOCK_TOKENS, MAX_CHUNK_TOKENS, errors.BadChunking, "the chunk size")
    if m.chunk_tokens % BLOCK_TOKENS:
        raise errors.BadChunking(f"the chunk size {m.chunk_tokens} is no multiple of {BLOCK_TOKENS}")
    bounded(len(m.groups), 1, MAX_GROUPS, errors.BadGroup, "the number of groups")
    for group in m.groups:
        bounded(group.heads, 1, MAX_HEADS, errors.BadGroup, "the number of kv heads")
        bounded(group.head_dim, 16, MAX_HEAD_DIM, errors.BadGroup, "the head dimension")
        if group.head_dim % 16:
            raise errors.BadGroup(f"head dimension {group.head_dim} is no multiple of 16")
        bounded(group.head_count, 1, MAX_HEADS, errors.BadShard, "the number of kv heads in the payload")
        bounded(group.head_first, 0, MAX_HEADS, errors.BadShard, "the first kv head in the payload")
        bounded(group.head_first + group.head_count, 1, group.heads, errors.BadShard, "the end of the kv head range")
        bounded(group.end_token, 1, MAX_TOKENS, errors.BadTokenRange, "the end of the token range")
        bounded(group.first_token, 0, group.end_token - 1, errors.BadTokenRange, "the first token")
        if type(group.kind) is not GroupKind:
            raise errors.BadGroup(f"a group of kind {group.kind!r}, which is no GroupKind")
        if (group.window > 0) != (group.kind is GroupKind.SLIDING_WINDOW):
            raise errors.BadGroup(f"a group of kind {group.kind.name} with a window of {group.window} tokens")
        bounded(group.window, 0, MAX_TOKENS, errors.BadGroup, "the window")
        whole_block = group.first_token % BLOCK_TOKENS == 0 and group.end_token == group.first_token + BLOCK_TOKENS
        if group.kind is GroupKind.STATE and not whole_block:
            raise errors.BadTokenRange("a state's range is not one whole block")
    bounded(len(m.codecs), 1, MAX_CODECS, errors.BadCoding, "the number of codecs")
    for codec in m.codecs:
        codec.check()
    _check_layers(m)


_passed: OfLayers[set[tuple]] = OfLayers(lambda _: set())
"""With which codecs and groups a table of layers has been found right."""
_PASSED = 16


def _check_layers(m: Manifest) -> None:
    passed_with = _passed(m.layers)
    shape = tuple(m.codecs), tuple((group.head_dim, group.kind) for group in m.groups)
    if shape in passed_with:
        return
    bounded(len(m.layers), 1, MAX_LAYERS, errors.LayerOrder, "the number of layers")
    previous = -1
    passed: set[tuple] = set()
    for layer in m.layers:
        bounded(layer.index, previous + 1, 2**16 - 1, errors.LayerOrder, "a layer's index")
        previous = layer.index
        bounded(layer.group, 0, len(m.groups) - 1, errors.BadReference, "a layer's group")
        bounded(layer.codec, 0, len(m.codecs) - 1, errors.BadReference, "a layer's codec")
        # Layers are mostly alike: what one has passed, the next need not.
        scales = (layer.key_scale, layer.value_scale) if type(layer.key_scale) is type(layer.value_scale) is float else None
        like = (layer.group, layer.codec, scales)
        if scales is not None and like in passed:
            continue
        codec = m.codecs[layer.codec]
        group = m.groups[layer.group]
        codec.check_head_dim(group.head_dim)
        if (codec.value.kind is CodingKind.NONE) != (group.kind is GroupKind.LATENT) and group.kind is not GroupKind.STATE:
            raise errors.BadCoding(f"layer {layer.index}: only latents and states come without a value side, and latents always do")
        opaque = codec.key.kind is CodingKind.OPAQUE and codec.value.kind in (CodingKind.OPAQUE, CodingKind.NONE)
        if group.kind is GroupKind.STATE and not opaque:
            raise errors.BadCoding(f"layer {layer.index}: a state is opaque")
        for side, scale in ((codec.key, layer.key_scale), (codec.value, layer.value_scale)):
            if not 0 < _as_fp32(scale) < math.inf or (side.kind is not CodingKind.FP8 and scale != 1.0):
                raise errors.BadScale(f"layer {layer.index} has the scale {scale}")
        passed.add(like)
    if {layer.group for layer in m.layers} != set(range(len(m.groups))):
        raise errors.BadReference("a group has no layer")
    if {layer.codec for layer in m.layers} != set(range(len(m.codecs))):
        raise errors.BadReference("a codec has no layer")
    if len(passed_with) >= _PASSED:
        passed_with.clear()
    passed_with.add(shape)
