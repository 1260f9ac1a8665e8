"""Control messages that are dropped, delayed, doubled, swapped, or replayed from an earlier lease, as they are received.

TLS over TCP does none of this: it stands for a peer that is broken or hostile.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import Any

import bridge.handoff.decoder
import bridge.handoff.listener
from bridge.handoff import messages
from bridge.handoff.channel import Channel

MESSAGE_FAULTS = {
    "message dropped": "a control message never comes",
    "message delayed": "it comes late",
    "message doubled": "it comes twice",
    "message swapped": "it comes after the next one",
    "message replayed": "one of an earlier lease comes before it",
}
MESSAGES = ("Hello", "Welcome", "Claim", "Grant", "Ready", "Taken", "Commit", "Released")


class Tamper:
    """What happens to the messages of one pair of ends."""

    def __init__(self) -> None:
        self.earlier: dict[str, messages.Message] = {}
        self._seen: dict[str, messages.Message] = {}
        self.arm(None)

    def arm(self, kind: str | None, message: str = "", at: int = 0, rng: random.Random | None = None) -> None:
        """kind: of MESSAGE_FAULTS. The fault meets message number `at` of its type."""
        self.kind, self.message, self.at, self.rng, self.met = kind, message, at, rng or random.Random(0), False
        self.earlier.update(self._seen)
        self._seen = {}

    def meets(self, message: messages.Message) -> bool:
        name = type(message).__name__
        self._seen[name] = message
        if self.kind is None or self.met or name != self.message:
            return False
        self.at -= 1
        if self.at >= 0 or (self.kind == "message replayed" and name not in self.earlier):
            return False
        self.met = True
        return True


BY_PORT: dict[int, Tamper] = {}
"""The tamper of each control port, and of each proxy's."""


class FaultyChannel(Channel):
    """A Channel whose received messages meet the tamper of its port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *more: Any) -> None:
        super().__init__(reader, writer, *more)
        ports = [(writer.get_extra_info(name) or (None, 0))[1] for name in ("sockname", "peername")]
        self._tamper = next((BY_PORT[port] for port in ports if port in BY_PORT), None)
        self._held: deque[messages.Message] = deque()

    async def receive(self, timeout: float) -> messages.Message:
        if self._held:
            return self._held.popleft()
        message, tamper = await super().receive(timeout), self._tamper
        if tamper is None or not tamper.meets(message):
            return message
        if tamper.kind == "message dropped":
            return await self.receive(timeout)
        if tamper.kind == "message delayed":
            await asyncio.sleep(tamper.rng.uniform(0.002, 0.05))
            return message
        if tamper.kind == "message swapped":
            following = await super().receive(timeout)
            self._held.append(message)
            return following
        self._held.append(message)
        return message if tamper.kind == "message doubled" else tamper.earlier[type(message).__name__]


def install() -> None:
    """Every channel that is made from now on in this process."""
    bridge.handoff.decoder.Channel = FaultyChannel  # type: ignore[misc]
    bridge.handoff.listener.Channel = FaultyChannel  # type: ignore[misc]
