"""Whether a payload fits a decoder, decided by meaning: model, layers, heads, codecs, tokens. Never by names, versions or paths."""

from __future__ import annotations

from bridge.codecs import check_tables
from bridge.handoff.errors import ContentDiffers, HeadsDiffer, LayersMissing, ModelDiffers, TokensMissing
from bridge.handoff.ticket import Ticket
from bridge.pages import BlockTable, PagedCache
from bridge.wire import ContentKind, Manifest


def check_ticket(manifest: Manifest, ticket: Ticket) -> None:
    """Raises ContentDiffers unless the manifest is the one that the ticket names."""
    named = (ticket.request_id, ticket.lease, ticket.generation)
    if (manifest.request_id, manifest.lease, manifest.generation) != named:
        raise ContentDiffers("the manifest is of another request, lease or generation than the ticket")


def check_fits(
    manifest: Manifest,
    cache: PagedCache,
    table: BlockTable,
    model_digest: bytes,
    first_token: int,
    end_token: int,
    content: tuple[tuple[ContentKind, bytes], ...] | None,
) -> None:
    """Raises the clause by which the payload does not fit.

    cache, table: the decoder's own pages. first_token, end_token: what it asks for. content: the digests that it expects, or None.
    """
    if manifest.model_digest != model_digest:
        raise ModelDiffers("the payload was computed with another model")
    if content is not None and manifest.content != content:
        raise ContentDiffers("the payload holds other tokens, or other adapters, images or salt, than this request")
    offered = {layer.index: layer for layer in manifest.layers}
    missing = sorted(set(cache.layers) - set(offered))
    if missing:
        raise LayersMissing(f"the payload lacks layers {missing[:8]}, which this decoder needs")
    for index, pages in cache.layers.items():
        layer = offered[index]
        group = manifest.groups[layer.group]
        if group.head_dim != pages.head_dim:
            raise HeadsDiffer(f"layer {index} has head dimension {group.head_dim} in the payload and {pages.head_dim} here")
        end_head = cache.first_head + pages.sides[0].heads
        if end_head > group.heads:
            raise HeadsDiffer(f"layer {index} has {group.heads} kv heads in the payload's model, this decoder holds up to {end_head}")
        if cache.first_head < group.head_first or end_head > group.head_first + group.head_count:
            raise LayersMissing(f"the payload lacks kv heads of layer {index} that this decoder needs")
        if not group.first_token <= first_token < end_token <= group.end_token:
            raise TokensMissing(
                f"the payload has tokens {group.first_token} to {group.end_token - 1}, asked for are {first_token} to {end_token - 1}"
            )
        check_tables(manifest.codecs[layer.codec], group.head_dim)
        # Refuses a short or wild block table before anything is transferred.
        table.locate(first_token, end_token, pages.sides[0].num_pages)
