"""What the connector's scheduler side tells its worker side at each step: plain dataclasses, carried by vLLM itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from bridge.errors import KVBridgeError
from bridge.vllm.params import DecodeOrder
from bridge.wire import ContentKind

Content = tuple[tuple[ContentKind, bytes], ...]
BlockIds = tuple[tuple[int, ...], ...]
"""The engine's blocks of a request, for each of its KV cache groups."""


@dataclass(frozen=True)
class Save:
    """Pack what is new of a request.

    wire_id: its name in the manifest. block_ids: the engine's blocks so far. computed, total: prompt tokens. codec: "" for the engine's.
    """

    request_id: str
    wire_id: str
    lease: tuple[int, int]
    block_ids: BlockIds
    computed: int
    total: int
    content: Content
    codec: str


@dataclass(frozen=True)
class Failure:
    """A typed failure, for another process: its clause, its detail and its advice."""

    clause: str
    detail: str
    advice: str

    @classmethod
    def of(cls, error: KVBridgeError) -> Failure:
        return cls(error.clause, error.detail, error.advice)


@dataclass(frozen=True)
class Load:
    """Fetch tokens [first_token, end_token) of a request into its blocks. error: why that cannot be, where there is no order."""

    request_id: str
    order: DecodeOrder | None
    error: Failure | None
    block_ids: BlockIds
    first_token: int
    end_token: int
    content: Content


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's orders. cancelled: prefills that ended otherwise than by finishing. declined: payloads that nobody will fetch."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    declined: list[DecodeOrder] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Clauses by which requests to hand something off were refused, to be counted."""
