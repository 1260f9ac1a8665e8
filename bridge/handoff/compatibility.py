"""Whether a payload fits a decoder, decided by meaning: model, layers, heads, codecs, tokens. Never by names, versions or paths."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.codecs import check_tables, codec_name
from bridge.handoff.errors import ContentDiffers, HeadsDiffer, LayersMissing, LossyPayload, ModelDiffers, OpaqueDiffers, TokensMissing
from bridge.handoff.messages import MAX_CHUNKS
from bridge.handoff.ticket import Ticket
from bridge.pages import CacheGroup, LayerDescription, PageSide
from bridge.shares import held_layers, token_end, written_range
from bridge.wire import CodingKind, ContentKind, Group, GroupKind, Manifest, PayloadMap, SlotCodec
from bridge.wire.alike import kinds_of
from bridge.wire.errors import TooLarge


def check_ticket(manifest: Manifest, ticket: Ticket) -> None:
    """Raises ContentDiffers unless the manifest is the one that the ticket names."""
    named = (ticket.request_id, ticket.lease, ticket.generation)
    if (manifest.request_id, manifest.lease, manifest.generation) != named:
        raise ContentDiffers("the manifest is of another request, lease or generation than the ticket")


def check_chunks(payload: PayloadMap) -> None:
    """Raises TooLarge for a payload of more chunks than messages can name."""
    if payload.chunk_count > MAX_CHUNKS:
        raise TooLarge(f"{payload.chunk_count} chunks, the limit is {MAX_CHUNKS}", remedy="choose a larger chunk size")


def check_fits(
    manifest: Manifest,
    groups: Sequence[CacheGroup],
    model_digest: bytes,
    first_token: int,
    end_token: int,
    content: tuple[tuple[ContentKind, bytes], ...] | None,
) -> None:
    """Raises the clause by which the payload does not fit.

    groups: the decoder's own pages. first_token, end_token: what it asks for. content: the digests that it expects, or None.
    """
    if manifest.model_digest != model_digest:
        raise ModelDiffers("the payload was computed with another model")
    if content is not None and manifest.content != content:
        raise ContentDiffers("the payload holds other tokens, or other adapters, images or salt, than this request")
    alike = held_layers(manifest.layers, [group.cache for group in groups])
    if sum(len(held.model_layers) for held in alike) < sum(len(group.cache.layers) for group in groups):
        missing = {index for group in groups for index in group.cache.layers} - {layer.index for layer in manifest.layers}
        raise LayersMissing(f"the payload lacks layers {sorted(missing)[:8]}, which this decoder needs")
    kinds = kinds_of(manifest.layers).kinds
    for held in alike:
        holder, index = groups[held.holder], held.model_layers[0]
        codec, group = manifest.codecs[kinds[held.kind][0]], manifest.groups[kinds[held.kind][1]]
        pages = holder.cache.layers[index]
        _check_heads(group, index, pages, held.first_head)
        _check_tokens(group, manifest, first_token, end_token)
        _check_opaque(index, pages.sides, codec)
        # A short or wild block table is refused before anything is transferred.
        check_tables(codec, group.head_dim)
        holder.table.check(*written_range(group, first_token, end_token), pages.sides[0].num_pages)


def _check_opaque(index: int, sides: tuple[PageSide, PageSide | None], codec: SlotCodec) -> None:
    """Raises OpaqueDiffers where one of both is opaque, and not the very same thing."""
    for side, coding in zip(sides, (codec.key, codec.value), strict=True):
        if side is not None and CodingKind.OPAQUE in (side.coding.kind, coding.kind) and side.coding != coding:
            raise OpaqueDiffers(
                f"layer {index} is {coding.kind.name.lower()} of {coding.row_bytes} bytes a row in the payload, "
                f"{side.coding.kind.name.lower()} of {side.coding.row_bytes} here, or of another meaning"
            )


def _check_heads(group: Group, index: int, pages: LayerDescription, first_head: int) -> None:
    if group.head_dim != pages.head_dim:
        raise HeadsDiffer(f"layer {index} has head dimension {group.head_dim} in the payload and {pages.head_dim} here")
    end_head = first_head + pages.sides[0].heads
    if end_head > group.heads:
        raise HeadsDiffer(f"layer {index} has {group.heads} kv heads in the payload's model, this decoder holds up to {end_head}")
    if first_head < group.head_first or end_head > group.head_first + group.head_count:
        raise LayersMissing(f"the payload lacks kv heads of layer {index} that this decoder needs")


def _check_tokens(group: Group, manifest: Manifest, first_token: int, end_token: int) -> None:
    """Full attention and latents: every token asked for. Windows: those that the tokens from end_token on look back at. States: the end."""
    if first_token >= end_token:
        raise TokensMissing(f"tokens {first_token} to {end_token - 1} are none")
    if group.kind is GroupKind.STATE:
        end = token_end(manifest)
        if end_token != end:
            raise TokensMissing(f"the payload's states are those after token {end - 1}, asked for are tokens up to {end_token - 1}")
        return
    needed = first_token
    if group.kind is GroupKind.SLIDING_WINDOW:
        # The token at end_token looks back at window - 1 others; those that come after it at fewer of the payload's.
        needed = max(first_token, end_token - group.window + 1)
    if not (group.first_token <= needed and end_token <= group.end_token):
        raise TokensMissing(
            f"the payload has tokens {group.first_token} to {group.end_token - 1} of a group, asked for are {needed} to {end_token - 1}"
        )


def check_lossless(manifest: Manifest, groups: Sequence[CacheGroup]) -> None:
    """Raises LossyPayload unless each side of each layer travels as plain elements, or in the very coding that these pages keep."""
    offered = {layer.index: layer for layer in manifest.layers}
    for index, pages in ((index, pages) for group in groups for index, pages in group.cache.layers.items()):
        codec = manifest.codecs[offered[index].codec]
        for coding, kept in zip((codec.key, codec.value), pages.sides, strict=True):
            if kept is not None and coding.kind is not CodingKind.RAW and coding != kept.coding:
                name = codec_name(codec, manifest.groups[offered[index].group].head_dim)
                raise LossyPayload(f"layer {index} travels as {name}, which is lossy, and this decoder has a prefix cache to keep exact")
