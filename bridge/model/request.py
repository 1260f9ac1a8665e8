"""The manifest of one request, from its model's geometry, its tokens and a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from bridge.codecs import declared
from bridge.codecs.errors import NotCarried
from bridge.model.config_fields import (
    BadConfig,
    GeometryError,
)
from bridge.model.geometry import ModelGeometry
from bridge.model.layer_groups import LayerGroup, OpaqueBytes
from bridge.sharding import DraftLayer
from bridge.wire import (
    BLOCK_TOKENS,
    Coding,
    CodingKind,
    ContentKind,
    Element,
    Group,
    GroupKind,
    Layer,
    Manifest,
    Shard,
    SlotCodec,
    token_digest,
)
from bridge.wire.coding import opaque as opaque_coding
from bridge.wire.manifest import MAX_TOKENS


class SharedLayer(GeometryError):
    """A layer that keeps no KV of its own among those to be carried."""

    clause = "shared_layer"
    remedy = "leave it out: its owner's KV is carried once, and serves both"


def manifest_for(
    geometry: ModelGeometry,
    codec: str,
    tokens: Sequence[int],
    request_id: str,
    *,
    model: bytes,
    lease: int,
    generation: int = 0,
    chunk_tokens: int = 1024,
    first_token: int = 0,
    per_layer: Mapping[int, str] | None = None,
    scales: Mapping[int, tuple[float, float]] | None = None,
    element: Element | None = None,
    layers: Sequence[int] | None = None,
    heads: tuple[int, int] | None = None,
    shard: Shard | None = None,
    content: Sequence[tuple[ContentKind, bytes]] = (),
    window_first: Mapping[int, int] | None = None,
    opaque: Mapping[int, OpaqueBytes] | None = None,
) -> Manifest:
    """The manifest of one request's KV, or of one rank's part of it: a group for each of the geometry's, and a codec for each layer.

    codec: the codec's name for all layers that `per_layer` (layer index -> name) does not list; latents take only raw. tokens: all token
    ids from position 0 on; the payload carries [first_token, len(tokens)). model: from `model_digest`. element: the pages' type, the
    geometry's if left out.
    layers: the layers carried, ascending, all that keep KV if left out. heads: (first, count) of the kv heads carried, all if left out;
    latents are whole on every TP rank, and a state is its rank's own. shard: the rank that packs.
    scales: layer index -> (key scale, value scale) of its fp8 sides. content: digests beside the tokens' (LoRA and so on).
    window_first: number of a sliding-window group -> the first token that the engine still has; otherwise the window's own first.
    opaque: layer index -> what its rows of full attention or latents are, where no codec knows them; they travel as they are.
    Raises BadConfig, SharedLayer, DraftLayer, UnknownCodec, NotCarried, and the WireError of a clause that the manifest would break.
    """
    per_layer, scales, opaque = per_layer or {}, scales or {}, opaque or {}
    if len(tokens) > MAX_TOKENS:
        raise BadConfig(f"{len(tokens)} tokens are over the limit of {MAX_TOKENS}", remedy="send less context")
    for index in (*per_layer, *scales, *opaque):
        if not 0 <= index < geometry.layers:
            raise BadConfig(f"there is no layer {index} among {geometry.layers}", remedy="count layers from 0")
    element, shard = element or geometry.element, shard or Shard()
    group_of = {index: number for number, group in enumerate(geometry.groups) for index in group.layers}
    groups: list[Group] = []
    codecs: list[SlotCodec] = []
    described: list[Layer] = []
    for index in sorted(group_of) if layers is None else layers:
        _check_carried(geometry, index)
        source = geometry.groups[group_of[index]]
        first = _first_token(source, first_token, len(tokens), (window_first or {}).get(group_of[index]))
        group = _group(source, first, len(tokens), heads, shard, is_opaque=index in opaque)
        slots = _slots(geometry, source, index, per_layer.get(index, codec), element, opaque.get(index))
        for entry, table in ((group, groups), (slots, codecs)):
            if entry not in table:
                table.append(entry)  # type: ignore[arg-type]
        described.append(Layer(index, groups.index(group), codecs.index(slots), *scales.get(index, (1.0, 1.0))))
    manifest = Manifest(
        model_digest=model,
        content=((ContentKind.TOKENS, token_digest(list(tokens))), *sorted(content)),
        request_id=request_id,
        lease=lease,
        generation=generation,
        chunk_tokens=chunk_tokens,
        groups=tuple(groups),
        codecs=tuple(codecs),
        layers=_same_table(tuple(described)),
        shard=shard,
    )
    manifest.check()
    return manifest


@lru_cache(maxsize=64)
def _same_table(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """One object for all equal tables: what is found out about a table is remembered for the object, see bridge.wire.alike."""
    return layers


def _check_carried(geometry: ModelGeometry, index: int) -> None:
    if index >= geometry.layers:
        raise DraftLayer(f"layer {index} is none of the model's {geometry.layers}, so a draft model's")
    if index < 0:
        raise BadConfig(f"there is no layer {index}", remedy="count layers from 0")
    owner = dict(geometry.shared).get(index)
    if owner is not None:
        raise SharedLayer(f"layer {index} keeps no KV of its own, it reads that of layer {owner}")


def _first_token(group: LayerGroup, first_token: int, end_token: int, held: int | None) -> int:
    """Where the group's range begins: at first_token, for windows at what of the window the engine has."""
    if group.kind is not GroupKind.SLIDING_WINDOW:
        if held is not None:
            raise BadConfig("window_first names a group that has no window", remedy="see ModelGeometry.groups")
        return first_token
    first = max(0, end_token - group.window) if held is None else held
    if not 0 <= first < end_token:
        raise BadConfig(f"a window that begins at token {first} has none of the {end_token} tokens", remedy="say what the engine holds")
    return max(first, first_token)


def _group(source: LayerGroup, first: int, end: int, heads: tuple[int, int] | None, shard: Shard, is_opaque: bool) -> Group:
    if source.kind is GroupKind.STATE:
        block = (end - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        return Group(shard.tp_size, source.head_dim, block, block + BLOCK_TOKENS, shard.tp_rank, 1, source.kind)
    if source.kind is GroupKind.LATENT:
        return Group(1, source.head_dim, first, end, 0, 1, source.kind)
    # Rows that nobody interprets have one side only, as latents have.
    kind = GroupKind.LATENT if is_opaque else source.kind
    return Group(source.kv_heads, source.head_dim, first, end, *(heads or (0, source.kv_heads)), kind, 0 if is_opaque else source.window)


def _slots(geometry: ModelGeometry, group: LayerGroup, index: int, codec: str, element: Element, opaque: OpaqueBytes | None) -> SlotCodec:
    none = Coding(CodingKind.NONE)
    if group.kind is GroupKind.STATE:
        if opaque is not None:
            raise BadConfig(f"layer {index} is a state, whose size the geometry has", remedy="give it to ModelGeometry.from_config")
        state = dict(geometry.states)[index]
        return SlotCodec(opaque_coding(state.meaning, state.nbytes // BLOCK_TOKENS), none)
    if opaque is not None:
        if group.kind is GroupKind.SLIDING_WINDOW:
            raise NotCarried(f"layer {index} has a sliding window, whose rows cannot be opaque", remedy="choose raw or a declared codec")
        return SlotCodec(opaque_coding(opaque.meaning, opaque.nbytes), none)
    named = declared(codec)
    if group.kind is not GroupKind.LATENT:
        return named.for_layer(group.head_dim, element)
    if not named.lossless:
        raise NotCarried(f"layer {index} keeps latents, and codec {codec} is for keys and values", remedy="choose raw for this model")
    return SlotCodec(named.for_layer(group.head_dim, element).key, none)
