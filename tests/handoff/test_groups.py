"""Payloads of several KV groups, each with its own block table, and engines that are split differently, through the whole hand-off."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from bridge.handoff import Mode, Target
from bridge.handoff.errors import HandoffError, HeadsDiffer, LayersMissing, OpaqueDiffers, Refused, TokensMissing
from bridge.model import ModelGeometry, OpaqueBytes, manifest_for
from bridge.pages import BlockTable, CacheGroup, LayerPages, OpaquePages, PagedCache, PagesDoNotFit
from bridge.sharding import Layout, plan
from bridge.wire import Group, GroupKind
from tests.handoff.pair import HEAD_DIM, HEADS, MODEL, block_table, manifest, paged_cache
from tests.waiting import PATIENCE

TOKENS, WINDOW, STATE_BYTES, CHUNK = 150, 40, 16 * 24, 32
GEOMETRY = ModelGeometry.from_config(
    {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "layer_types": ["linear_attention", "full_attention", "sliding_attention", "linear_attention"],
    },
    {index: OpaqueBytes("test/state", STATE_BYTES) for index in (0, 3)},
)
WINDOW_FIRST = TOKENS - WINDOW
POISON = 0xCD


def described(codec="raw", tokens=TOKENS, **more):
    return manifest_for(GEOMETRY, codec, range(tokens), "r", model=MODEL, lease=0, chunk_tokens=CHUNK, **more)


def floats(block, pages, seed):
    values = torch.randn(pages, block, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed or 0)).to(torch.bfloat16)
    return values if seed else torch.full_like(values, float("nan"))


class Side:
    """A prefiller's or decoder's pages: full attention, a window whose first pages are gone, two states."""

    def __init__(self, block, seed, state_page, state_bytes=STATE_BYTES):
        pages = 12 * 16 // block + 2
        self.full = [floats(block, pages, seed and seed + i) for i in (0, 1)]
        self.window = [floats(2 * block, pages, seed and seed + i) for i in (2, 3)]
        generator = torch.Generator().manual_seed(seed or 0)
        shape = (5, state_bytes)
        self.states = [
            torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) if seed else torch.full(shape, POISON, dtype=torch.uint8)
            for _ in (0, 1)
        ]
        self.state_page = state_page
        self.full_table = block_table(block, pages, (seed or 7) + 1)
        held = np.random.default_rng(seed or 9).permutation(pages).tolist()
        gone = WINDOW_FIRST // (2 * block)
        self.window_table = BlockTable([-1] * gone + held[: -(-TOKENS // (2 * block)) - gone], 2 * block)
        rows = [state.unflatten(1, (16, 1, state_bytes // 16)) for state in self.states]
        self.groups = [
            CacheGroup(PagedCache({1: LayerPages.nhd(*self.full)}), self.full_table),
            CacheGroup(PagedCache({2: LayerPages.nhd(*self.window)}), self.window_table),
            CacheGroup(
                PagedCache({index: OpaquePages(row, "test/state") for index, row in zip((0, 3), rows, strict=True)}),
                BlockTable.of_state(state_page, TOKENS),
            ),
        ]

    def tokens(self, name, first, end):
        table = self.full_table if name == "full" else self.window_table
        tensors = getattr(self, name)
        page, position = table.locate(first, end, tensors[0].shape[0])
        return torch.stack([tensor[page, position] for tensor in tensors])


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("first", [0, 70, 130])
def test_every_group_lands_in_its_own_pages(pair, mode, first):
    source, target = Side(16, 1, 3), Side(32, None, 1)
    made = described()
    assert [g.kind for g in made.groups] == [GroupKind.STATE, GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW]
    offer = pair.prefiller.offer(made, source.groups, mode=mode)
    fetch = pair.decoder.start(offer.ticket, Target(target.groups, None, MODEL, first_token=first))
    for computed in (40, 100, TOKENS - 1):
        offer.advance(computed)
        assert not offer.packed  # the states are those after the last token
    offer.advance(TOKENS)
    fetch.result(PATIENCE)
    offer.wait(PATIENCE)
    assert torch.equal(source.tokens("full", first, TOKENS), target.tokens("full", first, TOKENS))
    begin = max(first, WINDOW_FIRST)
    assert torch.equal(source.tokens("window", begin, TOKENS), target.tokens("window", begin, TOKENS))
    for name, count in (("full", TOKENS - first), ("window", TOKENS - begin)):
        for tensor in getattr(target, name):
            assert int((~torch.isnan(tensor)).sum()) == count * HEADS * HEAD_DIM
    for mine, theirs in zip(target.states, source.states, strict=True):
        assert torch.equal(mine[1], theirs[3])
        assert bool((mine[[0, 2, 3, 4]] == POISON).all())
    assert pair.prefiller.staging()[0] == pair.decoder.staging()[0] == 0


def test_codecs_of_one_group_leave_the_others_alone(pair):
    source, target = Side(16, 1, 3), Side(32, None, 1)
    offer = pair.prefiller.offer(described("turboquant_4bit_nc", per_layer={2: "raw"}), source.groups)
    offer.advance(TOKENS)
    pair.decoder.fetch(offer.ticket, Target(target.groups, None, MODEL))
    a, b = source.tokens("full", 0, TOKENS).float(), target.tokens("full", 0, TOKENS).float()
    assert 0 < float(((a - b) ** 2).sum() / (a**2).sum()) < 0.05
    assert torch.equal(source.tokens("window", WINDOW_FIRST, TOKENS), target.tokens("window", WINDOW_FIRST, TOKENS))
    assert torch.equal(target.states[0][1], source.states[0][3])


def refused(pair, made, target, **more):
    source = Side(16, 1, 3)
    offer = pair.prefiller.offer(made, source.groups)
    offer.advance(TOKENS)
    with pytest.raises(HandoffError) as caught:
        pair.decoder.fetch(offer.ticket, Target(target.groups, None, MODEL, **more))
    with pytest.raises(Refused):
        offer.wait(PATIENCE)
    for tensor in (*target.full, *target.window):
        assert bool(torch.isnan(tensor).all())
    return caught.value


def test_a_window_that_lost_too_much_is_refused(pair):
    # The token after the last looks back at WINDOW - 1 others.
    fits = WINDOW_FIRST + 1
    error = refused(pair, described(window_first={2: fits + 1}), Side(32, None, 1))
    assert isinstance(error, TokensMissing)
    assert f"asked for are {fits} to {TOKENS - 1}" in str(error)


def test_a_window_that_has_just_enough_is_taken(pair):
    source, target = Side(16, 1, 3), Side(32, None, 1)
    offer = pair.prefiller.offer(described(window_first={2: WINDOW_FIRST + 1}), source.groups)
    offer.advance(TOKENS)
    pair.decoder.fetch(offer.ticket, Target(target.groups, None, MODEL))
    assert torch.equal(source.tokens("window", WINDOW_FIRST + 1, TOKENS), target.tokens("window", WINDOW_FIRST + 1, TOKENS))


def test_states_of_another_token_are_refused(pair):
    error = refused(pair, described(), Side(32, None, 1), end_token=TOKENS - 1)
    assert isinstance(error, TokensMissing)
    assert "states" in str(error)


def test_states_of_another_size_are_refused(pair):
    error = refused(pair, described(), Side(32, None, 1, state_bytes=2 * STATE_BYTES))
    assert isinstance(error, OpaqueDiffers)


def test_states_of_another_meaning_are_refused(pair):
    target = Side(32, None, 1)
    held = target.groups[2].cache
    other = {index: replace(pages, meaning="test/other") for index, pages in held.layers.items()}
    target.groups[2] = CacheGroup(PagedCache(other), target.groups[2].table)
    assert isinstance(refused(pair, described(), target), OpaqueDiffers)


def test_each_layer_of_a_kind_is_asked_for_its_meaning(pair):
    """The second of two states that are alike in everything else: once a kind of layer had passed, its like was not looked at."""
    target = Side(32, None, 1)
    held = target.groups[2].cache
    first, second = held.layers
    layers = {first: held.layers[first], second: replace(held.layers[second], meaning="test/other")}
    target.groups[2] = CacheGroup(PagedCache(layers), target.groups[2].table)
    error = refused(pair, described(), target)
    assert isinstance(error, OpaqueDiffers)
    assert f"layer {second} " in str(error)


def test_groups_must_hold_what_the_manifest_names(pair):
    source = Side(16, 1, 3)
    cases = {
        "a group is missing": (source.groups[:2], None),
        "a layer stands in two": ([*source.groups, source.groups[0]], None),
        "no groups": ([], None),
        "a table beside groups": (source.groups, source.full_table),
        "a cache without its table": (source.groups[0].cache, None),
    }
    for groups, table in cases.values():
        with pytest.raises(PagesDoNotFit):
            pair.prefiller.offer(described(), groups, table)
    assert pair.prefiller.staging()[0] == pair.prefiller.live_leases() == 0


def test_tables_that_grow_are_given_for_every_group(pair):
    source, target = Side(16, 1, 3), Side(32, None, 1)
    short = [CacheGroup(group.cache, BlockTable(group.table.pages[:1], group.table.block_size)) for group in source.groups]
    offer = pair.prefiller.offer(described(), short)
    with pytest.raises(PagesDoNotFit, match="1 block tables were given for 3"):
        offer.advance(TOKENS, source.full_table)
    offer.advance(TOKENS, [group.table for group in source.groups])
    pair.decoder.fetch(offer.ticket, Target(target.groups, None, MODEL))
    assert torch.equal(source.tokens("full", 0, TOKENS), target.tokens("full", 0, TOKENS))


# Engines that are split differently: HEADS = 2, 3 layers.

LAYOUTS = {"whole": Layout.of(3, HEADS), "TP 2": Layout.of(3, HEADS, 2), "TP 4": Layout.of(3, HEADS, 4), "PP 3": Layout.of(3, HEADS, 1, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_ranks_of_two_layouts(pair, source, target):
    """Each prefiller rank offers its shard under a lease of its own; each decoder rank fetches its reads, all at once."""
    prefill, decode = LAYOUTS[source], LAYOUTS[target]
    made = plan(prefill, decode)
    whole, table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    offers = {}
    for rank in range(prefill.ranks):
        if made.readers[rank]:
            holding = prefill.holding(rank)
            base = manifest("r", TOKENS)
            shard = replace(
                base,
                groups=(Group(HEADS, HEAD_DIM, 0, TOKENS, *holding.heads),),
                layers=tuple(layer for layer in base.layers if layer.index in holding.layers),
                shard=prefill.shard(rank),
            )
            cache = whole.part(list(holding.layers), *holding.heads)
            offers[rank] = pair.prefiller.offer(shard, cache, table, lease=(1000 + rank, 1))
            offers[rank].advance(TOKENS)
    # Every rank of an engine is a process with a decoder of its own.
    decoders = [pair.new_decoder() for _ in range(decode.ranks)]
    ranks, fetches = [], []
    for rank in range(decode.ranks):
        holding = decode.holding(rank)
        pages = paged_cache(64, 4, seed=None)
        cache = PagedCache({index: pages.layers[index].narrow(0, holding.heads[1]) for index in holding.layers}, holding.first_head)
        ranks.append((holding, cache, block_table(64, 4, 30 + rank)))
        for read in made.reads[rank]:
            reader, readers = made.reader(read.source, rank)
            part = cache.part(list(read.part.layers), *read.part.heads)
            fetches.append(
                decoders[rank].start(offers[read.source].ticket, pair.target(part, ranks[-1][2], reader=reader, readers=readers))
            )
    for fetch in fetches:
        fetch.result(PATIENCE)
    for offer in offers.values():
        offer.wait(PATIENCE)
    page, position = table.locate(0, TOKENS, 12)
    for holding, cache, decode_table in ranks:
        there, at = decode_table.locate(0, TOKENS, 4)
        for index in holding.layers:
            for name in ("key", "value"):
                sent = getattr(whole.layers[index], name)[page, position][:, holding.first_head : holding.end_head]
                assert torch.equal(getattr(cache.layers[index], name)[there, at], sent)
    assert pair.prefiller.staging()[0] == sum(decoder.staging()[0] for decoder in decoders) == 0
    assert pair.prefiller.counters.snapshot()["committed"] == len(offers)
    for decoder in decoders:
        decoder.close()


def test_a_rank_that_asks_for_what_another_rank_has_is_refused(pair):
    whole, table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    base = manifest("r", TOKENS)
    half = replace(base, groups=(Group(HEADS, HEAD_DIM, 0, TOKENS, 1, 1),))
    offer = pair.prefiller.offer(half, whole.part([0, 1, 2], 1, 1), table)
    offer.advance(TOKENS)
    with pytest.raises(LayersMissing, match="kv heads"):
        pair.decoder.fetch(offer.ticket, pair.target(paged_cache(64, 4, seed=None), block_table(64, 4, 3)))
    with pytest.raises(PagesDoNotFit, match="no kv heads 1 to 2"):
        whole.part([0], 1, 2)
    with pytest.raises(PagesDoNotFit, match="layer 3"):
        whole.part([3], 0, 1)


def test_many_readers_of_one_rank_commit_once(pair):
    """Four decoder ranks read from two; both leases end when both of their readers have committed."""
    made = plan(LAYOUTS["TP 2"], LAYOUTS["TP 4"])
    assert made.readers == ((0, 1), (2, 3))
    whole, table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    half = replace(manifest("r", TOKENS), groups=(Group(HEADS, HEAD_DIM, 0, TOKENS, 0, 1),))
    offer = pair.prefiller.offer(half, whole.part([0, 1, 2], 0, 1), table)
    offer.advance(TOKENS)
    target = paged_cache(64, 4, seed=None).part([0, 1, 2], 0, 1)
    pair.decoder.fetch(offer.ticket, pair.target(target, block_table(64, 4, 3), reader=0, readers=2))
    assert pair.prefiller.live_leases() == 1
    done = threading.Thread(target=offer.wait, args=(PATIENCE,))
    done.start()
    pair.decoder.fetch(offer.ticket, pair.target(target, block_table(64, 4, 3), reader=1, readers=2))
    done.join(PATIENCE)
    assert pair.prefiller.live_leases() == 0


def test_heads_of_another_model_are_told_apart(pair):
    target = Side(32, None, 1)
    wide = torch.zeros(8, 32, HEADS, 2 * HEAD_DIM, dtype=torch.bfloat16)
    target.groups[0] = CacheGroup(PagedCache({1: LayerPages.nhd(wide, wide.clone())}), target.groups[0].table)
    assert isinstance(refused(pair, described(), target), HeadsDiffer)
