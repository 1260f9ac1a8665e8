"""Which kv heads and layers each rank of an engine holds, and who reads what from whom when two engines are split differently.

Everything is a pure function of the two layouts, so every rank of both sides computes the same plan and nobody has to send it.

What has no shard here, and why:
- Data parallelism (DP): each DP rank is an engine of its own, with its own layout; a request belongs to one of them.
- Context parallelism (DCP, PCP) spreads one head's tokens over ranks, which no head or layer range describes: refused by name.
- Draft layers of speculative decoding are not carried: the decoder recomputes them. See `carried_layers`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bridge.errors import KVBridgeError
from bridge.wire.manifest import MAX_HEADS, MAX_LAYERS, MAX_RANKS, Shard


class ShardingError(KVBridgeError):
    """A layout that cannot be described, or two that do not belong to one model."""

    clause = "sharding"
    remedy = "compare both sides' TP and PP settings with the model's kv heads and layers"


class UnevenHeads(ShardingError):
    """kv heads that do not divide over the TP ranks, in either direction, as engines require."""

    clause = "uneven_heads"
    remedy = "choose a TP size that divides the kv heads or is a multiple of them, or give each rank's heads"


class UnsupportedParallelism(ShardingError):
    """A kind of parallelism that this version cannot carry."""

    clause = "unsupported_parallelism"
    remedy = "switch it off for engines that hand requests off"


class DraftLayer(ShardingError):
    """A layer of a draft model among those to be carried."""

    clause = "draft_layer"
    remedy = "leave draft layers out (see sharding.carried_layers): the decoder recomputes them"


@dataclass(frozen=True)
class Holding:
    """What one rank holds: kv heads [first_head, end_head) of layers [first_layer, end_layer)."""

    first_head: int
    end_head: int
    first_layer: int
    end_layer: int

    @property
    def heads(self) -> tuple[int, int]:
        """(first, count), as `model.manifest_for` takes them."""
        return self.first_head, self.end_head - self.first_head

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    def meet(self, other: Holding) -> Holding | None:
        """What both hold, or None."""
        met = Holding(
            max(self.first_head, other.first_head),
            min(self.end_head, other.end_head),
            max(self.first_layer, other.first_layer),
            min(self.end_layer, other.end_layer),
        )
        return met if met.first_head < met.end_head and met.first_layer < met.end_layer else None


@dataclass(frozen=True)
class Layout:
    """An engine's ranks: PP stages one after another, within each the TP ranks. Rank number = pp_rank * tp + tp_rank.

    kv_heads: the model's; 1 for latents, which every TP rank keeps whole. heads: [first, end) of each TP rank; ranks of equal heads are
    replicas of each other. stages: [first, end) of each PP stage's layers. Make one with `of`.
    Raises ShardingError unless the stages are contiguous and the heads of all ranks cover the model's.
    """

    kv_heads: int
    heads: tuple[tuple[int, int], ...]
    stages: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        ranks = len(self.heads) * len(self.stages)
        sizes = (self.kv_heads, MAX_HEADS, "kv heads"), (ranks, MAX_RANKS, "ranks"), (self.layers, MAX_LAYERS, "layers")
        for number, limit, what in sizes:
            if not 1 <= number <= limit:
                raise ShardingError(f"{number} {what} are outside 1 to {limit}")
        expected = 0
        for first, end in self.stages:
            if first != expected or end <= first:
                raise ShardingError(f"PP stages {list(self.stages)[:8]} are not contiguous ranges of at least one layer, from layer 0 on")
            expected = end
        reached = 0
        for first, end in sorted(self.heads):
            if not 0 <= first < end <= self.kv_heads or first > reached:
                raise ShardingError(f"the TP ranks' heads {list(self.heads)[:8]} do not cover the model's {self.kv_heads}")
            reached = max(reached, end)
        if reached != self.kv_heads:
            raise ShardingError(f"the TP ranks' heads {list(self.heads)[:8]} do not cover the model's {self.kv_heads}")

    @classmethod
    def of(
        cls,
        layers: int,
        kv_heads: int,
        tp: int = 1,
        pp: int = 1,
        *,
        heads: Sequence[tuple[int, int]] | None = None,
        stages: Sequence[tuple[int, int]] | None = None,
        dcp: int = 1,
        pcp: int = 1,
    ) -> Layout:
        """The layout of an engine of tp * pp ranks.

        heads: each TP rank's [first, end), where an engine splits unevenly; otherwise `even_heads`. stages: each PP stage's layers
        [first, end), where they were configured by hand; otherwise `even_stages`. dcp, pcp: sizes of context parallelism.
        Raises UnsupportedParallelism where dcp or pcp is not 1, UnevenHeads, ShardingError.
        """
        for size, what in ((dcp, "decode context parallelism (DCP)"), (pcp, "prefill context parallelism (PCP)")):
            if size != 1:
                raise UnsupportedParallelism(f"{what} of size {size} spreads the tokens of one head over ranks, which is not supported")
        if tp < 1 or pp < 1 or tp * pp > MAX_RANKS:
            raise ShardingError(f"TP {tp} and PP {pp} are outside 1 to {MAX_RANKS} ranks")
        if kv_heads < 1 or layers < 1:
            raise ShardingError(f"a model of {layers} layers and {kv_heads} kv heads has no KV")
        layout = cls(kv_heads, tuple(heads or even_heads(kv_heads, tp)), tuple(stages or even_stages(layers, pp)))
        if len(layout.heads) != tp or len(layout.stages) != pp or layout.layers != layers:
            raise ShardingError(f"the given heads and stages are not those of {layers} layers on TP {tp} and PP {pp}")
        return layout

    @property
    def layers(self) -> int:
        return self.stages[-1][1] if self.stages else 0

    @property
    def tp(self) -> int:
        return len(self.heads)

    @property
    def pp(self) -> int:
        return len(self.stages)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def holding(self, rank: int) -> Holding:
        """What rank number `rank` holds."""
        return Holding(*self.heads[rank % self.tp], *self.stages[rank // self.tp])

    def first_replicas(self) -> tuple[int, ...]:
        """Of ranks that hold the same, the lowest: what has to be offered when nobody knows yet who will read, and no more."""
        lowest = {self.holding(rank): rank for rank in reversed(range(self.ranks))}
        return tuple(sorted(lowest.values()))

    def shard(self, rank: int) -> Shard:
        """The rank as it stands in its payload's manifest."""
        return Shard(rank % self.tp, self.tp, rank // self.tp, self.pp)


def even_heads(kv_heads: int, tp: int) -> list[tuple[int, int]]:
    """Each TP rank's kv heads [first, end), as engines split them: equal parts, or one head on kv_heads / tp replicas each.

    Raises UnevenHeads where neither number divides the other, which vLLM and SGLang refuse too (vLLM: QKVParallelLinear).
    """
    if kv_heads >= tp and kv_heads % tp == 0:
        count = kv_heads // tp
        return [(rank * count, (rank + 1) * count) for rank in range(tp)]
    if tp > kv_heads and tp % kv_heads == 0:
        replicas = tp // kv_heads
        return [(rank // replicas, rank // replicas + 1) for rank in range(tp)]
    raise UnevenHeads(f"{kv_heads} kv heads do not divide over {tp} TP ranks, nor the ranks over the heads")


def even_stages(layers: int, pp: int) -> list[tuple[int, int]]:
    """Each PP stage's layers [first, end), as vLLM splits them (get_pp_indices): what remains goes to the last stages but the very last.

    Raises ShardingError where there are fewer layers than stages.
    """
    if layers < pp:
        raise ShardingError(f"{layers} layers do not fill {pp} PP stages")
    whole, rest = divmod(layers, pp)
    stages, first = [], 0
    for stage in range(pp):
        end = first + whole + (pp - 1 - rest <= stage < pp - 1)
        stages.append((first, end))
        first = end
    return stages


@dataclass(frozen=True)
class Read:
    """One payload that a decoder rank takes a part of: from the prefiller's rank `source`, what `part` says."""

    source: int
    part: Holding


@dataclass(frozen=True)
class Plan:
    """Who reads what.

    reads: for each decoder rank, its reads in the order of their layers and heads; together they are all it holds, each head once.
    readers: for each prefiller rank, the decoder ranks that read from it, ascending. A rank without readers need not offer its payload:
    another one holds the same.
    """

    reads: tuple[tuple[Read, ...], ...]
    readers: tuple[tuple[int, ...], ...]

    def reader(self, source: int, rank: int) -> tuple[int, int]:
        """(reader, readers) of the decoder rank `rank` at the prefiller's rank `source`: what `handoff.Target` and its claim carry.

        Raises ShardingError where the plan has no such read.
        """
        if rank not in self.readers[source]:
            raise ShardingError(f"decoder rank {rank} reads nothing from prefiller rank {source}")
        return self.readers[source].index(rank), len(self.readers[source])


def plan(prefiller: Layout, decoder: Layout, offering: Collection[int] | None = None) -> Plan:
    """What each decoder rank reads from which prefiller rank, so that every head of every layer that it holds is read exactly once.

    Of prefiller ranks that hold the same heads, one is read: the one with the fewest readers so far, the first of several. So with equal
    layouts every rank reads from its like, and a hybrid model's states, which need equal layouts, come with the same rank's heads. A read
    takes as many heads as its source has, from the first that is still missing.
    offering: the prefiller's ranks that can be read from; by default all.
    Raises ShardingError where the two layouts are not of one model, or where what offers lacks a head.
    """
    if (prefiller.layers, prefiller.kv_heads) != (decoder.layers, decoder.kv_heads):
        raise ShardingError(
            f"the prefiller has {prefiller.layers} layers of {prefiller.kv_heads} kv heads, "
            f"the decoder {decoder.layers} of {decoder.kv_heads}"
        )
    sources = sorted(set(range(prefiller.ranks) if offering is None else offering))
    readers: list[list[int]] = [[] for _ in range(prefiller.ranks)]
    reads = []
    for rank in range(decoder.ranks):
        wanted, found = decoder.holding(rank), []
        for stage, (first_layer, end_layer) in enumerate(prefiller.stages):
            if max(first_layer, wanted.first_layer) >= min(end_layer, wanted.end_layer):
                continue
            stage_sources = [source for source in sources if source // prefiller.tp == stage]
            head = wanted.first_head
            while head < wanted.end_head:
                holders = _holders(prefiller, stage_sources, head)
                if not holders:
                    raise ShardingError(f"none of the prefiller's ranks that offer holds kv head {head}")
                source = min(holders, key=lambda s: (-prefiller.holding(s).end_head, len(readers[s]), s))
                end_head = min(prefiller.holding(source).end_head, wanted.end_head)
                part = Holding(head, end_head, max(first_layer, wanted.first_layer), min(end_layer, wanted.end_layer))
                found.append(Read(source, part))
                if rank not in readers[source]:
                    readers[source].append(rank)
                head = part.end_head
        reads.append(tuple(found))
    return Plan(tuple(reads), tuple(tuple(ranks) for ranks in readers))


def _holders(layout: Layout, ranks: Iterable[int], head: int) -> list[int]:
    return [rank for rank in ranks if layout.holding(rank).first_head <= head < layout.holding(rank).end_head]


def carried_layers(indices: Iterable[int], layers: int) -> tuple[list[int], list[int]]:
    """(layers that a payload carries, draft layers) of an engine's list of cached layers, both ascending.

    Engines number the layers of a draft model (EAGLE, MTP) from the model's own number of layers on. Those are not carried: the decoder
    recomputes them, or drafts worse until it has. Its tokens stay the model's own either way, since every draft is verified.
    """
    ordered = sorted(set(indices))
    return [index for index in ordered if index < layers], [index for index in ordered if index >= layers]
