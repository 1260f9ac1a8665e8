"""A TCP proxy between the two ends that can stop, trickle, cut or damage what passes: real sockets, real TLS."""

from __future__ import annotations

import asyncio
import contextlib

from bridge.handoff.loop import LoopThread

LINK_FAULTS = {
    "half-open": "nothing passes any more in either direction, and nobody is told",
    "trickle": "one byte a second passes",
    "cut": "the connection is reset in mid-message",
    "damage": "a byte of the TLS stream is another one",
}
_CHUNK = 1 << 16
_PATIENCE = 60.0


class Proxy:
    """Listens on `port` of the loopback interface and forwards to `target`. mode: "" or one of LINK_FAULTS."""

    def __init__(self, loop: LoopThread, target: int) -> None:
        self._loop, self.target, self.mode, self.met = loop, target, "", False
        self._writers: set[asyncio.StreamWriter] = set()
        self._healed = loop.run(self._event(), _PATIENCE)
        self._server = loop.run(asyncio.start_server(self._accept, "127.0.0.1", 0), _PATIENCE)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _event(self) -> asyncio.Event:
        return asyncio.Event()

    def fail(self, mode: str) -> None:
        """From now on; from any thread. Connections that are open meet it with their next bytes."""
        self._loop.run(self._set(mode), _PATIENCE)

    def heal(self) -> None:
        """What was open ends, as it does when a network comes back after both ends have given up; new connections work."""
        self._loop.run(self._set(""), _PATIENCE)

    def close(self) -> None:
        self._server.close()
        self.heal()

    async def _set(self, mode: str) -> None:
        self.mode = mode
        if mode in ("", "cut"):
            self.met = self.met or (mode == "cut" and bool(self._writers))
            for writer in list(self._writers):
                writer.transport.abort()
            self._healed.set()
            self._healed = asyncio.Event()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._writers -= {writer, far_writer}
            for one in (writer, far_writer):
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK):
            healed, mode = self._healed, self.mode
            self.met = self.met or bool(mode)
            if mode == "cut":
                raise ConnectionResetError
            if mode == "half-open":
                await healed.wait()
                raise ConnectionResetError
            if mode == "trickle":
                for byte in data:
                    writer.write(bytes([byte]))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(healed.wait(), 1.0)
                        raise ConnectionResetError
            elif mode == "damage":
                self.mode = ""
                place = len(data) // 2
                writer.write(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
            else:
                writer.write(data)
            await writer.drain()
        raise ConnectionResetError
