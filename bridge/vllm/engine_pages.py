"""An engine's pages by KV cache group: each has its own block table, and its blocks may be several of the blocks that its kernels use."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.pages import BlockTable, CacheGroup, PagedCache
from bridge.vllm.errors import UnsupportedEngine


@dataclass(frozen=True)
class BlockGroup:
    """Layers that share block ids. block_size: tokens of one of the engine's blocks."""

    layers: tuple[int, ...]
    block_size: int


@dataclass(frozen=True)
class EnginePages:
    """A worker's whole cache. Raises UnsupportedEngine where groups and pages do not belong together."""

    cache: PagedCache
    groups: tuple[BlockGroup, ...]
    _parts: dict[tuple[int, int], list[PagedCache]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of each group, by the heads asked for: the same objects for every request, which the hand-off knows again."""

    def __post_init__(self) -> None:
        layers = [index for group in self.groups for index in group.layers]
        if sorted(layers) != sorted(self.cache.layers):
            raise UnsupportedEngine(f"the KV cache groups hold the layers {sorted(layers)[:8]}, the cache {sorted(self.cache.layers)[:8]}")
        for group in self.groups:
            for index in group.layers:
                if group.block_size % self._kernel_block(index):
                    raise UnsupportedEngine(f"blocks of {group.block_size} tokens in kernel blocks of {self._kernel_block(index)}")

    def _kernel_block(self, index: int) -> int:
        return self.cache.layers[index].sides[0].block_size

    def tables(self, block_ids: tuple[tuple[int, ...], ...]) -> list[BlockTable]:
        """A block table for each group. Raises UnsupportedEngine where the engine gave blocks of another number of groups."""
        if len(block_ids) != len(self.groups):
            raise UnsupportedEngine(f"blocks of {len(block_ids)} KV cache groups, the engine registered {len(self.groups)}")
        found = []
        for group, blocks in zip(self.groups, block_ids, strict=True):
            size = self._kernel_block(group.layers[0])
            parts = group.block_size // size
            found.append(BlockTable(blocks if parts == 1 else [block * parts + part for block in blocks for part in range(parts)], size))
        return found

    def located(self, block_ids: tuple[tuple[int, ...], ...], heads: tuple[int, int]) -> list[CacheGroup]:
        """Some of the model's kv heads, (first, count), of a request's blocks. Raises PagesDoNotFit where these pages lack one."""
        tables = self.tables(block_ids)
        if heads not in self._parts:
            self._parts[heads] = [self.cache.part(sorted(group.layers), *heads) for group in self.groups]
        return [CacheGroup(part, table) for part, table in zip(self._parts[heads], tables, strict=True)]
