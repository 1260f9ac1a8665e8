"""The prefiller's control port: who may connect, and what becomes of their leases when they go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from bridge.counters import Counters
from bridge.errors import KVBridgeError
from bridge.handoff import messages, tls
from bridge.handoff.bounds import Bounds, Observer
from bridge.handoff.channel import Channel
from bridge.handoff.errors import HandoffError, PeerLost, ProtocolError
from bridge.handoff.identity import Identity, PeerConfig, PinnedPeers, server_context
from bridge.handoff.leases import Leases
from bridge.handoff.session import Session

MAX_SESSIONS = 1024

_HANDSHAKE = "handshake"


class Listener:
    """Accepts authenticated decoders. Made anywhere, used on one loop's thread."""

    def __init__(
        self,
        identity: Identity,
        peers: Mapping[str, PeerConfig],
        leases: Leases,
        welcome: Callable[[], messages.Welcome],
        bounds: Bounds,
        counters: Counters,
        observe: Observer,
    ) -> None:
        self._pinned = PinnedPeers(peers)
        self._server = tls.Server(self._accept, server_context(identity, peers), bounds.connect, self._stranger)
        self._leases, self._welcome, self._bounds, self._counters, self._observe = leases, welcome, bounds, counters, observe
        self._sessions = 0

    async def open(self, host: str, port: int) -> int:
        """Opens the port and returns its number (port 0: any free one). Raises OSError or OverflowError."""
        await self._server.open(host, port)
        return self._server.port

    async def close(self) -> None:
        """Closes the port. Connections live on until the loop ends; what was told to them may still leave."""
        await self._server.close()
        await asyncio.sleep(0.05)

    def _stranger(self, address: str, reason: str) -> None:
        self._refuse(_HANDSHAKE, address, reason)

    def _refuse(self, clause: str, address: str, reason: str) -> None:
        self._counters.add("refused", clause)
        self._observe("refused", {"address": address, "reason": reason})

    async def _accept(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, "an unknown peer", self._bounds.silence)
        session: Session | None = None
        try:
            try:
                certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            except ValueError:  # the connection has failed since its handshake
                raise PeerLost("a peer ended the connection as soon as it was made") from None
            channel.peer = self._pinned.name_of(certificate)
            if self._sessions >= MAX_SESSIONS:
                raise ProtocolError(f"{MAX_SESSIONS} control connections are open already")
            self._sessions += 1
            session = Session(channel, self._leases, self._welcome, self._bounds, self._observe)
            await session.serve()
        except KVBridgeError as error:  # an agent that cannot describe itself is no hand-off's error
            if session is None or not session.greeted or isinstance(error, ProtocolError):
                self._refuse(error.clause, address, error.detail)
            if session is not None and isinstance(error, HandoffError):
                self._leases.drop(session, error)
        except asyncio.CancelledError:
            # The prefiller is closing; asyncio would log this as a failure of its own.
            pass
        finally:
            if session is not None:
                self._sessions -= 1
                self._leases.drop(session, PeerLost(f"the connection to {channel.peer} ended"))
            # Nothing is left to give up by now: a cancellation that comes here would only be logged.
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close()
