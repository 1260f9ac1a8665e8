"""A prefiller and a decoder in one process, with paged caches of a small model, for tests of the hand-off."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.cpu.device import CpuReferenceDevice
from bridge.codecs import declared
from bridge.handoff import Bounds, Decoder, Identity, Offer, PeerConfig, Prefiller, Target, create_identity
from bridge.pages import BlockTable, LayerPages, PagedCache
from bridge.wire import ContentKind, Element, Group, Layer, Manifest, token_digest
from tests.handoff.local_agent import LocalAgent
from tests.waiting import PATIENCE, eventually

HEADS, HEAD_DIM, LAYERS = 2, 64, 3
MODEL = bytes(range(32))
BOUNDS = Bounds(
    connect=PATIENCE, claim=PATIENCE, chunk=PATIENCE, transfer=PATIENCE, staging=PATIENCE, lease=120, heartbeat=0.5, silence=PATIENCE
)
"""Nothing that goes well takes so long, on any machine. A test in which a bound is reached gives a shorter one for that alone."""
TOKENS = 150
"""Of most requests here: five chunks."""


def paged_cache(block_size: int, pages: int, seed: int | None) -> PagedCache:
    """Random bf16 pages, or pages of NaN where no seed is given."""
    generator = torch.Generator().manual_seed(seed or 0)

    def tensor() -> torch.Tensor:
        shape = (pages, block_size, HEADS, HEAD_DIM)
        values = torch.full(shape, float("nan")) if seed is None else torch.randn(shape, generator=generator)
        return values.to(torch.bfloat16)

    return PagedCache({index: LayerPages.nhd(tensor(), tensor()) for index in range(LAYERS)})


def block_table(block_size: int, pages: int, seed: int) -> BlockTable:
    """Every page once, in random order."""
    return BlockTable(np.random.default_rng(seed).permutation(pages).tolist(), block_size)


def manifest(request_id: str, tokens: int, codec: str = "raw", chunk_tokens: int = 32, model: bytes = MODEL) -> Manifest:
    return Manifest(
        model_digest=model,
        content=((ContentKind.TOKENS, token_digest(list(range(tokens)))),),
        request_id=request_id,
        lease=0,
        generation=0,
        chunk_tokens=chunk_tokens,
        groups=(Group(HEADS, HEAD_DIM, 0, tokens),),
        codecs=(declared(codec).for_layer(HEAD_DIM, Element.BF16),),
        layers=tuple(Layer(index, 0, 0) for index in range(LAYERS)),
    )


def tokens_of(cache: PagedCache, table: BlockTable, tokens: int) -> np.ndarray:
    """Everything that the pages hold of tokens [0, tokens), as bytes."""
    parts = []
    for layer in cache.layers.values():
        page, position = table.locate(0, tokens, layer.key.shape[0])
        parts += [layer.key[page, position].view(torch.int16).numpy(), layer.value[page, position].view(torch.int16).numpy()]
    return np.stack(parts)


@dataclass
class Pair:
    """Both ends and their certificates."""

    folder: Path
    bounds: Bounds = BOUNDS
    staging_bytes: int = 1 << 22
    stream_depth: int = 2
    agent: LocalAgent = field(default_factory=LocalAgent)
    steps: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Why the prefiller turned connections away."""

    def __post_init__(self) -> None:
        self.prefill_identity = self._identity("prefill-0")
        self.decode_identity = self._identity("decode-0")
        self.prefiller = self.new_prefiller()
        self.decoder = self.new_decoder()

    def _observe(self, step: str, details: dict[str, Any]) -> None:
        self.steps.append(f"prefiller {step}")
        if step == "refused":
            self.refusals.append(details["reason"])

    def _identity(self, name: str) -> Identity:
        return create_identity(name, self.folder)

    def new_prefiller(self, port: int = 0, device: CpuReferenceDevice | None = None) -> Prefiller:
        return Prefiller(
            self.prefill_identity,
            {"decode-0": PeerConfig(self.decode_identity.certificate)},
            device or CpuReferenceDevice(),
            self.agent,
            staging_bytes=self.staging_bytes,
            port=port,
            bounds=self.bounds,
            stream_depth=self.stream_depth,
            observe=self._observe,
        )

    def new_decoder(self, device: CpuReferenceDevice | None = None) -> Decoder:
        return Decoder(
            self.decode_identity,
            {"prefill-0": PeerConfig(self.prefill_identity.certificate, "127.0.0.1", self.prefiller.port)},
            device or CpuReferenceDevice(),
            self.agent,
            staging_bytes=self.staging_bytes,
            bounds=self.bounds,
            observe=lambda step, details: self.steps.append(f"decoder {step}"),
        )

    def target(self, cache: PagedCache, table: BlockTable, model: bytes = MODEL, **more: object) -> Target:
        return Target(cache, table, model, **more)  # type: ignore[arg-type]

    def close(self) -> None:
        self.decoder.close()
        self.prefiller.close()


def parked(pair: Pair, source: tuple[PagedCache, BlockTable], **more: Any) -> Offer:
    """A request that was packed whole and waits for its decoder."""
    offer = pair.prefiller.offer(manifest("r", TOKENS, **more), *source)
    offer.advance(TOKENS)
    return offer


def everything_is_free(pair: Pair) -> bool:
    """Whether both ends come to hold nothing."""
    return eventually(lambda: pair.prefiller.staging()[0] == pair.decoder.staging()[0] == 0 and pair.prefiller.live_leases() == 0)
