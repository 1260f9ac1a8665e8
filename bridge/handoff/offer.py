"""One offered request, as the engine sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bridge.devices import engine_order
from bridge.handoff.errors import Cancelled, HandoffTimeout
from bridge.handoff.lease import Lease
from bridge.handoff.leases import Leases
from bridge.handoff.packing import Packer
from bridge.handoff.ticket import Ticket
from bridge.pages import BlockTable


class Offer:
    """Made by `Prefiller.offer`. Its ticket goes to the router, and from there to the decoder."""

    def __init__(self, peer: str, packer: Packer, leases: Leases, lease: Lease) -> None:
        self._packer, self._leases, self._lease = packer, leases, lease
        manifest = lease.manifest
        self.manifest, self.mode = manifest, lease.mode
        self.ticket = Ticket(peer, manifest.request_id, manifest.lease, manifest.generation)

    def advance(self, computed_tokens: int, table: BlockTable | Sequence[BlockTable] | None = None) -> None:
        """Packs every chunk whose tokens are all below `computed_tokens`, and returns when their pages are no longer needed.

        table: the block table as it is now (with several KV groups, one of each), where it has grown or changed since the offer. In stream
        mode this waits for the decoder to take earlier chunks. Raises what ended the lease, if something did, PagesDoNotFit where the
        table is too short, and PackingFailed where the device fails. If another thread has ended the lease meanwhile, the pages are
        still being read until this has returned.
        """
        self._packer.advance(self._lease, computed_tokens, table)

    async def advance_async(self, computed_tokens: int, table: BlockTable | Sequence[BlockTable] | None = None) -> None:
        """`advance` for engines that run on an event loop; the pages are read after what the calling thread has queued by now."""
        order = engine_order(self._packer.device)
        await asyncio.to_thread(self._packer.advance, self._lease, computed_tokens, table, order)

    def cancel(self, reason: str = "the prefiller's engine gave the request up") -> None:
        """Revokes the lease; nothing happens if it has ended. What `advance` packs at this moment is never served."""
        self._leases.finish(self._lease, Cancelled(reason))

    def wait_claimed(self) -> None:
        """Waits until a decoder has claimed the payload, at most until the lease runs out. Raises what ended it before that."""
        self._leases.wait_claimed(self._lease)

    def wait(self, timeout: float) -> None:
        """Waits until every reader has committed. Raises what ended the lease otherwise, or HandoffTimeout (the lease lives on)."""
        if not self._lease.finished.wait(timeout):
            raise HandoffTimeout(f"request {self.manifest.request_id!r} was not taken within {timeout} s")
        if self._lease.error is not None:
            raise self._lease.error

    async def wait_async(self, timeout: float) -> None:
        """`wait` for engines that run on an event loop."""
        await asyncio.to_thread(self.wait, timeout)

    @property
    def packed(self) -> bool:
        """Whether every chunk is packed, so that the engine's pages are free."""
        return self._lease.next_chunk == self._lease.map.chunk_count

    @property
    def payload_bytes(self) -> int:
        return self._lease.map.payload_bytes

    @property
    def pack_seconds(self) -> float:
        """Time spent packing so far."""
        return self._lease.pack_seconds
