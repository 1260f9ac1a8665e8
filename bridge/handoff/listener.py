"""The prefiller's control port: who may connect, and what becomes of their leases when they go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from bridge.counters import Counters
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
        self._context = server_context(identity, peers)
        self._leases, self._welcome, self._bounds, self._counters, self._observe = leases, welcome, bounds, counters, observe
        self._sessions = 0
        self._server: asyncio.Server | None = None

    async def open(self, host: str, port: int) -> int:
        """Opens the port and returns its number (port 0: any free one). Raises OSError or OverflowError."""
        self._server = await tls.serve(self._accept, host, port, self._context, self._bounds.connect, self._stranger)
        number: int = self._server.sockets[0].getsockname()[1]
        return number

    async def close(self) -> None:
        """Closes the port. Connections live on until the loop ends; what was told to them may still leave."""
        if self._server is not None:
            self._server.close()
            await asyncio.sleep(0.05)

    def _stranger(self, reason: str) -> None:
        self._counters.add("refused", _HANDSHAKE)
        self._observe("refused", {"reason": reason})

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, "an unknown peer", self._bounds.silence)
        session: Session | None = None
        try:
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            channel.peer = self._pinned.name_of(certificate)
            if self._sessions >= MAX_SESSIONS:
                raise ProtocolError(f"{MAX_SESSIONS} control connections are open already")
            self._sessions += 1
            session = Session(channel, self._leases, self._welcome, self._bounds, self._observe)
            await session.serve()
        except HandoffError as error:
            if session is None:
                self._counters.add("refused", error.clause)
                self._observe("refused", {"reason": error.detail})
            else:
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
