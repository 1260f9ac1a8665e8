"""Who holds what, and who reads what from whom: every head of every layer of every decoder rank exactly once."""

from itertools import pairwise, product

import pytest

from bridge.sharding import (
    Holding,
    Layout,
    Read,
    ShardingError,
    UnevenHeads,
    UnsupportedParallelism,
    carried_layers,
    even_heads,
    even_stages,
    plan,
)
from bridge.wire import Shard

HEADS = TPS = range(1, 17)


def possible(heads, tp):
    return heads % tp == 0 or tp % heads == 0


def unevenly(heads, tp):
    """Contiguous heads for any TP: the first ranks have one more, and with fewer heads than ranks each is on neighbouring ranks."""
    if heads < tp:
        return [(rank * heads // tp, rank * heads // tp + 1) for rank in range(tp)]
    ends = [rank * (heads // tp) + min(rank, heads % tp) for rank in range(tp + 1)]
    return list(pairwise(ends))


def check(prefiller, decoder, offering=None):
    made = plan(prefiller, decoder, offering)
    seen = [set() for _ in range(prefiller.ranks)]
    for rank in range(decoder.ranks):
        wanted = decoder.holding(rank)
        covered = []
        for read in made.reads[rank]:
            source = prefiller.holding(read.source)
            assert source.meet(read.part) == read.part
            assert wanted.meet(read.part) == read.part
            covered += product(read.part.layers, range(read.part.first_head, read.part.end_head))
            seen[read.source].add(rank)
        assert sorted(covered) == list(product(wanted.layers, range(wanted.first_head, wanted.end_head)))
    for source, ranks in enumerate(made.readers):
        assert set(ranks) == seen[source]
        assert [made.reader(source, rank) for rank in ranks] == [(number, len(ranks)) for number in range(len(ranks))]
    return made


@pytest.mark.parametrize("heads", HEADS)
def test_every_tp_pair_reads_every_head_once(heads):
    pairs = 0
    for p, d in product([tp for tp in TPS if possible(heads, tp)], repeat=2):
        made = check(Layout.of(1, heads, p), Layout.of(1, heads, d))
        # A rank reads from as few ranks as its share needs, and replicas share their readers evenly.
        ranges = even_heads(heads, p)
        for rank, reads in enumerate(made.reads):
            first, end = even_heads(heads, d)[rank]
            assert len(reads) == len({held for held in ranges if held[0] < end and first < held[1]})
        for held in set(ranges):
            counts = [len(ranks) for ranks, mine in zip(made.readers, ranges, strict=True) if mine == held]
            assert max(counts) - min(counts) <= 1
        pairs += 1
    assert pairs >= 4


@pytest.mark.parametrize("heads", HEADS)
def test_uneven_splits_that_the_engine_gives(heads):
    for p, d in product(TPS, repeat=2):
        check(Layout.of(1, heads, p, heads=unevenly(heads, p)), Layout.of(1, heads, d, heads=unevenly(heads, d)))


@pytest.mark.parametrize("heads", HEADS)
def test_what_does_not_divide_is_refused_by_name(heads):
    for tp in TPS:
        if possible(heads, tp):
            parts = even_heads(heads, tp)
            assert {end - first for first, end in parts} == {max(heads // tp, 1)}
            assert sorted({head for first, end in parts for head in range(first, end)}) == list(range(heads))
            assert all(parts.count(part) == max(tp // heads, 1) for part in parts)
        else:
            with pytest.raises(UnevenHeads, match=f"{heads} kv heads"):
                Layout.of(4, heads, tp)


@pytest.mark.parametrize("pp", [(1, 1), (1, 3), (3, 1), (2, 4), (4, 3), (7, 5)])
@pytest.mark.parametrize("tp", [(1, 1), (1, 4), (4, 1), (2, 8), (8, 2), (4, 4)])
def test_stages_and_heads_together(tp, pp):
    made = check(Layout.of(7, 4, tp[0], pp[0]), Layout.of(7, 4, tp[1], pp[1]))
    assert all(reads == tuple(sorted(reads, key=lambda r: (r.part.first_layer, r.part.first_head))) for reads in made.reads)


def test_stages_are_vllms():
    for layers, pp in product(range(1, 40), range(1, 12)):
        if layers < pp:
            with pytest.raises(ShardingError, match="do not fill"):
                even_stages(layers, pp)
            continue
        sizes = [layers // pp] * pp
        for back in range(2, layers % pp + 2):
            sizes[-back] += 1
        stages = even_stages(layers, pp)
        assert [end - first for first, end in stages] == sizes
        assert stages[0][0] == 0
        assert stages[-1][1] == layers
        assert all(a[1] == b[0] for a, b in pairwise(stages))


def test_ranks_are_numbered_stage_by_stage():
    layout = Layout.of(6, 4, 2, 3)
    assert layout.holding(3) == Holding(2, 4, 2, 4)
    assert layout.shard(3) == Shard(1, 2, 1, 3)
    assert layout.holding(3).heads == (2, 2)
    assert list(layout.holding(3).layers) == [2, 3]


def test_replicas_are_read_once_and_their_readers_shared():
    made = plan(Layout.of(2, 2, 4), Layout.of(2, 2, 1))
    assert [read.source for read in made.reads[0]] == [0, 2]
    assert made.readers == ((0,), (), (0,), ())
    made = plan(Layout.of(2, 1, 2), Layout.of(2, 1, 4))
    assert made.readers == ((0, 2), (1, 3))
    assert made.reader(1, 3) == (1, 2)
    with pytest.raises(ShardingError, match="reads nothing"):
        made.reader(0, 1)


@pytest.mark.parametrize("heads", HEADS)
def test_first_replicas_are_enough_for_every_decoder(heads):
    pairs = 0
    for p, d in product([tp for tp in TPS if possible(heads, tp)], repeat=2):
        prefiller, decoder = Layout.of(2, heads, p, 2), Layout.of(2, heads, d)
        offering = prefiller.first_replicas()
        assert len(offering) == 2 * min(heads, p)
        made = check(prefiller, decoder, offering)
        assert all(not ranks for source, ranks in enumerate(made.readers) if source not in offering)
        pairs += 1
    assert pairs >= 4


def test_what_nobody_offers_is_refused():
    with pytest.raises(ShardingError, match="kv head 1"):
        plan(Layout.of(1, 2, 2), Layout.of(1, 2), offering=[0])


def test_equal_layouts_read_from_their_like():
    """So a hybrid model's states, which only equal layouts exchange, come with the same rank's heads."""
    for heads, tp, pp in product(HEADS, TPS, (1, 2)):
        if possible(heads, tp):
            layout = Layout.of(3, heads, tp, pp)
            made = plan(layout, layout)
            assert made.reads == tuple((Read(rank, layout.holding(rank)),) for rank in range(layout.ranks))
            assert made.readers == tuple((rank,) for rank in range(layout.ranks))


@pytest.mark.parametrize(("sizes", "name"), [({"dcp": 2}, "DCP"), ({"pcp": 4}, "PCP"), ({"dcp": 0}, "DCP")])
def test_context_parallelism_is_refused_by_name(sizes, name):
    with pytest.raises(UnsupportedParallelism, match=name):
        Layout.of(4, 8, 2, **sizes)


BAD = {
    "a hole between stages": {"stages": [(0, 2), (3, 4)], "pp": 2},
    "stages of another model": {"stages": [(0, 2), (2, 5)], "pp": 2},
    "an empty stage": {"stages": [(0, 4), (4, 4)], "pp": 2},
    "fewer stages than PP": {"stages": [(0, 4)], "pp": 2},
    "a head that nobody holds": {"heads": [(0, 3), (4, 8)], "tp": 2},
    "heads beyond the model": {"heads": [(0, 4), (4, 9)], "tp": 2},
    "the last heads missing": {"heads": [(0, 4), (4, 7)], "tp": 2},
    "no ranks": {"tp": 0},
    "too many ranks": {"tp": 4096, "pp": 2},
}


@pytest.mark.parametrize("case", BAD)
def test_layouts_that_are_none(case):
    with pytest.raises(ShardingError):
        Layout.of(4, 8, **BAD[case])


def test_two_models_have_no_plan():
    with pytest.raises(ShardingError, match="4 layers of 8"):
        plan(Layout.of(4, 8), Layout.of(4, 4))


def test_draft_layers_are_told_apart():
    assert carried_layers([3, 0, 32, 1, 33], 32) == ([0, 1, 3], [32, 33])
