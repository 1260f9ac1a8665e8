"""UCX without NIXL, through ucxx: the owner of the bytes sends them, tagged, from its registered memory into the reader's.

ucxx's Python interface has no one-sided reads, and that is welcome: the owner looks at each request, so releasing a registration ends the
reads of it, and a peer that edits the metadata gains nothing. The transport itself is still not authenticated and not encrypted: the
data port is for trusted networks only.

A read asks for a bounded number of bytes at a time. One that was given up asks for no more; what is under way arrives, and until then it
is in quarantine. An owner that sends nothing for `patience` seconds then loses its endpoint, which ends it (measured: no byte later).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np

from bridge.transfer import described
from bridge.transfer.agent import Memory, ReadRange, Registration, RemoteMemory
from bridge.transfer.counts import ReadCounters, Tally
from bridge.transfer.described import Described, Region
from bridge.transfer.errors import AgentUnavailable, BadRange, PeerUnreachable, TransferFailed, TransferTimeout, said
from bridge.transfer.host import check_host, view_of
from bridge.transfer.names import check_name
from bridge.transfer.ranges import check_ranges, pieces_of
from bridge.transfer.ucx import wire
from bridge.transfer.ucx.owner import Owner
from bridge.transfer.ucx.reader import Link, Reading
from bridge.transfer.ucx.worker import UcxWorker
from bridge.transfer.ucx_environment import check_transports

_CALL_SECONDS = 10.0
_LOOK_SECONDS = 0.005
_RELEASE_SECONDS = 0.1
"""What a release waits at most: it is called on threads that others wait for, and may be called again."""

_PART_SECONDS = 2.0
"""What a close waits at most for links to end by themselves, and for what readers asked for: endpoints that are closed by force leak
their sockets (UCX 1.21, TCP: 9 to 17 a pair in the middle of a read)."""

_LOG = logging.getLogger("kvbridge.transfer")
_KEPT: list[UcxAgent] = []
"""Agents that were closed while UCX might still touch their memory."""


class UcxRegistration:
    """Memory that peers can read, or that reads land in. Once `release` has returned no peer reads it and nothing lands in it."""

    def __init__(self, agent: UcxAgent, number: int, memory: Memory) -> None:
        self.memory, self.number = memory, number
        self.array = np.frombuffer(view_of(memory), np.uint8)
        self._agent = agent
        self._changed = threading.Condition()
        self._users = 0
        self._alive = True

    @property
    def alive(self) -> bool:
        """Whether its release has not begun."""
        return self._alive

    def enter(self) -> bool:
        """For the serving side: whether the bytes may be sent, until `leave`."""
        with self._changed:
            self._users += self._alive
            return self._alive

    def leave(self) -> None:
        """Ends what `enter` began."""
        with self._changed:
            self._users -= 1
            self._changed.notify_all()

    def retire(self) -> None:
        """Nobody enters any more, and no read into it is started."""
        with self._changed:
            self._alive = False

    def unused(self, seconds: float) -> bool:
        """Waits until nobody is inside; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._users, timeout=seconds)

    def release(self) -> None:
        """Idempotent. Peers' reads of it fail. Raises TransferTimeout while an unfinished read of ours may write into it."""
        self._agent._deregister(self)


class UcxTransfer:
    """A read under way. It moves on by itself; `done` only looks."""

    def __init__(self, peer: UcxPeer, target: UcxRegistration, reading: Reading) -> None:
        self.nbytes = reading.nbytes
        self._peer, self._target, self._reading = peer, target, reading
        self._given_up = False

    @property
    def settled(self) -> bool:
        """Whether no byte of this read can arrive any more."""
        return self._reading.settled

    def done(self) -> bool:
        """Whether all bytes have arrived. Raises TransferFailed when the read failed or was given up."""
        reading = self._reading
        if reading.failure is not None:
            raise TransferFailed(f"a read from {self._peer.name} failed: {reading.failure}")
        if self._given_up or reading.given_up:
            raise TransferFailed(f"a read from {self._peer.name} was given up before it had finished")
        return reading.settled

    def release(self) -> None:
        """Gives the read up if it is unfinished: nothing more is asked for.

        Raises TransferTimeout while bytes may still arrive; call it again later. It returns after `patience` seconds at the latest, since
        an owner that is silent for so long loses its endpoint.
        """
        self._peer._agent._release(self)


class UcxPeer:
    """A connected agent of another process. Made by UcxAgent.connect."""

    def __init__(self, agent: UcxAgent, about: Described, link: Link) -> None:
        self.name = about.name
        self._agent, self._regions, self._link = agent, about.regions, link
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Why the link ended, or None."""
        return self._agent._worker.failure or self._link.failure

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> UcxTransfer:
        """Starts one read of all ranges (1 to 65,536; each is a message of its own). Raises BadRange, TransferFailed."""
        return self._agent._read(self, source, target, ranges)

    def disconnect(self) -> None:
        """Ends the use of this peer, idempotent. Its unfinished reads are given up; the last user's disconnect ends them at once."""
        self._agent._disconnect(self)


class UcxAgent:
    """One process's end of UCX. All methods may be called from any thread.

    name: by which peers know it, at most 128 bytes of UTF-8.
    transports: UCX transports to allow, such as ["rc", "tcp"]; used only where the environment has no UCX_TLS.
    serves: whether peers may read from this agent.
    in_flight_bytes: how much one read asks for at a time, at most: the bound on late bytes.
    patience: see UcxTransfer.release. connect_seconds: for the owner's greeting. silence: seconds after which a reader that takes nothing
    of what it asked for is let go.
    Raises AgentUnavailable.
    """

    kind = "ucx"

    def __init__(
        self,
        name: str,
        *,
        transports: Sequence[str] | None = None,
        serves: bool = True,
        in_flight_bytes: int = 64 << 20,
        connect_seconds: float = 5.0,
        patience: float = 5.0,
        silence: float = 15.0,
    ) -> None:
        check_name(name)
        if in_flight_bytes < 4096:
            raise AgentUnavailable("in_flight_bytes is less than 4096", remedy="leave it at its default")
        check_transports(transports)
        self.name = name
        self._serves = serves
        self._connect_seconds, self._patience = connect_seconds, patience
        self._window = in_flight_bytes
        self._piece_bytes = max(4096, in_flight_bytes // 4)
        self._instance = secrets.token_bytes(described.INSTANCE_BYTES)
        self._lock = threading.RLock()
        self._tally = Tally()
        self._numbers = itertools.count(1)
        self._registrations: dict[int, UcxRegistration] = {}
        self._links: dict[bytes, Link] = {}  # by the owner's instance
        self._all_links: list[Link] = []  # the worker's thread's own
        self._peers: set[UcxPeer] = set()
        self._active: list[UcxTransfer] = []
        self._quarantine: list[UcxTransfer] = []
        self._closed = False
        self._owner = Owner(lambda: self._worker, self._instance, lambda number: self._registrations.get(number), silence)
        self._worker = UcxWorker(transports, self._handle, self._tick)

    # -- on the worker's thread

    def _handle(self, message: wire.Message) -> None:
        if isinstance(message, (wire.Welcome, wire.Verdict)):
            for link in self._all_links:
                if link.session == message.session:
                    link.handle(message)
                    return
            raise wire.BadMessage("an answer to nothing")
        if not self._serves:
            raise wire.BadMessage("this agent does not serve")
        self._owner.handle(message)

    def _tick(self) -> None:
        self._owner.tick()
        for link in self._all_links:
            link.tick()
        self._all_links = [link for link in self._all_links if not link.over]

    def _ended(self, reading: Reading) -> None:
        with self._lock:
            if reading.failure is not None:
                self._tally.failed += 1
            elif reading.given_up:
                self._tally.given_up += 1
                self._tally.quarantined += reading.in_flight > 0
            else:
                self._tally.finished += 1
                self._tally.bytes += reading.nbytes

    # -- what peers and operators ask

    def metadata(self) -> bytes:
        """What a peer needs to connect: valid for memory that is registered when it is called. At most 1 MiB.

        Raises RegistrationFailed when it would be larger, AgentUnavailable after close.
        """
        with self._lock:
            self._living()
            regions = [Region(r.number, r.memory.address, r.memory.nbytes) for r in self._registrations.values()]
        return described.encode(Described(self.kind, self.name, self._instance, self._worker.address, regions))

    def transports(self) -> str:
        """Which transports are allowed and by whom, and those of the endpoints that are connected, as UCX last reported them."""
        with self._lock:
            links = [link for link in self._links.values() if link.failure is None]
        if self._worker.failure is not None:
            return f"{self._worker.allowed}; nothing is connected any more: {self._worker.failure}"
        if not links or self._closed:
            return f"{self._worker.allowed}; nothing is connected"
        ways = sorted({f"{link.peer}: {', '.join(link.transports) or 'unknown'}" for link in links})
        return f"{self._worker.allowed}; reads go by {'; '.join(ways)}"

    def turned_away(self) -> dict[str, int]:
        """What peers were refused."""
        return {"reads": self._owner.refused, "messages": self._worker.ignored}

    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(registration.memory.nbytes for registration in self._registrations.values())

    def counters(self) -> ReadCounters:
        """What was read so far."""
        with self._lock:
            return self._tally.counters(self.progress())

    def progress(self) -> int:
        """How many reads are in quarantine."""
        with self._lock:
            self._active = [t for t in self._active if not t.settled]
            self._quarantine = [t for t in self._quarantine if not t.settled]
            return len(self._quarantine)

    # -- memory

    def register(self, memory: Memory) -> UcxRegistration:
        """Registers host memory, which must stay allocated until its release has returned. Raises BadRange."""
        check_host(memory, "our", self.kind)
        with self._lock:
            self._living()
            registration = UcxRegistration(self, next(self._numbers), memory)
            self._registrations[registration.number] = registration
            return registration

    def _deregister(self, registration: UcxRegistration) -> None:
        with self._lock:
            if self._registrations.get(registration.number) is not registration:
                return
            self.progress()
            if any(transfer._target is registration for transfer in self._active + self._quarantine):
                raise TransferTimeout(
                    "memory cannot be released while an unfinished read may write into it", remedy="release or finish its reads first"
                )
            registration.retire()  # under the lock that reads are started under
        if not registration.unused(1.0):  # readers that take nothing lose their endpoints
            self._worker.post(lambda: self._owner.let_go(registration.number))
            if not registration.unused(_CALL_SECONDS):
                raise TransferTimeout("memory cannot be released while UCX still sends from it", remedy="call release again")
        with self._lock:
            self._registrations.pop(registration.number, None)

    # -- peers

    def connect(self, metadata: bytes) -> UcxPeer:
        """Connects within `connect_seconds`; peers of one running agent share a link. Raises PeerUnreachable."""
        about = described.decode(metadata, self.kind)
        if about.instance == self._instance:
            raise PeerUnreachable("an agent cannot connect to itself", remedy="use a second agent")
        with self._lock:
            self._living()
            link = self._links.get(about.instance)
            if link is not None and link.failure is None:
                return self._add(about, link)
        link = self._dial(about)
        with self._lock:
            other = self._links.get(about.instance)
            if other is not None and other.failure is None:  # another thread was faster
                spare, link = link, other
                self._worker.post(spare.leave)
            self._living()
            self._links[about.instance] = link
            return self._add(about, link)

    def _dial(self, about: Described) -> Link:
        made: list[Link] = []

        def begin() -> Link:
            link = Link(self._worker, about.name, about.instance, about.endpoint, self._patience)
            self._all_links.append(link)
            made.append(link)
            return link

        def abandon() -> None:
            for link in made:
                link.fail("it did not answer")

        if not 0 < len(about.endpoint) <= wire.CONTROL_BYTES // 2:
            raise PeerUnreachable("the peer's metadata holds no UCX address")
        deadline = time.monotonic() + self._connect_seconds
        try:
            link = self._worker.call(begin, self._connect_seconds)
            answered = link.ready.wait(max(0.0, deadline - time.monotonic()))
        except BaseException as error:  # the bindings raise types of their own
            self._worker.post(abandon)  # behind what may have begun
            if isinstance(error, AgentUnavailable) or not isinstance(error, Exception):
                raise
            why = f"time is up after {self._connect_seconds} s, UCX was busy" if isinstance(error, TimeoutError) else said(error)
            raise PeerUnreachable(f"{about.name} does not answer, or UCX does not understand its address: {why}") from error
        if not answered:
            self._worker.post(abandon)
            raise PeerUnreachable(f"{about.name} did not answer within {self._connect_seconds} s")
        if link.failure is not None:
            raise PeerUnreachable(f"{about.name} cannot be read: {link.failure}", remedy="connect again, with its current metadata")
        return link

    def _add(self, about: Described, link: Link) -> UcxPeer:
        link.users += 1
        peer = UcxPeer(self, about, link)
        self._peers.add(peer)
        return peer

    def _disconnect(self, peer: UcxPeer) -> None:
        with self._lock:
            if peer._closed:
                return
            peer._closed = True
            self._peers.discard(peer)
            link = peer._link
            link.users -= 1
            last = not link.users
            for instance, other in list(self._links.items()):
                if last and other is link:
                    del self._links[instance]
            unfinished = [t for t in self._active if t._peer is peer and not t.settled]
            for transfer in unfinished:
                self._give_up(transfer)
        if last and not self._closed:
            self._worker.post(link.leave)

    # -- reads

    def _read(self, peer: UcxPeer, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> UcxTransfer:
        check_host(source, "the peer's", self.kind)
        with self._lock:
            self._living()
            if peer._closed:
                raise TransferFailed(f"{peer.name} was disconnected", remedy="connect again")
            link = peer._link
            if link.failure is not None:
                raise TransferFailed(
                    f"the connection to {peer.name} had failed: {link.failure}", remedy="connect again, with its current metadata"
                )
            if not isinstance(target, UcxRegistration) or self._registrations.get(target.number) is not target or not target.alive:
                raise BadRange("the target is not registered with this agent")
            table = check_ranges(source, target.memory, ranges)
            region, start = described.region_of(peer._regions, source, peer.name)
            table[:, 0] += start
            nbytes = int(table[:, 2].sum())
            pieces = pieces_of(table, self._piece_bytes, wire.RANGES_PER_REQUEST)
            reading = Reading(target.array, region, pieces, nbytes, self._window, self._ended)
            transfer = UcxTransfer(peer, target, reading)
            self._tally.started += 1
            self.progress()
            self._active.append(transfer)
        self._worker.post(lambda: link.start(reading))
        return transfer

    def _give_up(self, transfer: UcxTransfer) -> None:
        if transfer._given_up or transfer.settled:
            return
        transfer._given_up = True
        link, reading = transfer._peer._link, transfer._reading
        if transfer in self._active:
            self._active.remove(transfer)
            self._quarantine.append(transfer)
        self._worker.post(lambda: link.give_up(reading))

    def _release(self, transfer: UcxTransfer) -> None:
        if transfer.settled:
            return
        with self._lock:
            fresh = not transfer._given_up
            self._give_up(transfer)
        if fresh:  # what is not under way yet settles at once; but the thread may be closing an endpoint whose peer is silent: seconds
            self._worker.catch_up(_RELEASE_SECONDS)
        if not transfer.settled:
            raise TransferTimeout(f"a read from {transfer._peer.name} is unfinished and its bytes may still arrive")

    # -- the end

    def _living(self) -> None:
        if self._closed:
            raise AgentUnavailable(f"the agent {self.name} is closed", remedy="make a new one")
        self._worker.check()

    def _wait_parted(self) -> None:
        """Waits, _PART_SECONDS at most, until our links are over and what readers asked for is sent."""

        def unfinished() -> bool:
            for link in self._all_links:
                link.fail("this agent was closed")  # those that were made meanwhile: all others were left before
            return bool(self._all_links) or self._owner.sending()

        deadline = time.monotonic() + _PART_SECONDS
        with contextlib.suppress(Exception):  # the thread has ended, or is busy: whatever it is, the close goes on
            while self._worker.call(unfinished, max(0.0, deadline - time.monotonic())):
                time.sleep(_LOOK_SECONDS)

    def close(self) -> None:
        """Closes every endpoint and destroys the worker, idempotent. No byte arrives and no peer reads after it has returned.

        What is under way has _PART_SECONDS to arrive. Where UCX does not come to an end, that is logged: the memory is kept, and what might
        still arrive stays in quarantine.
        """
        with self._lock:
            if self._closed:
                return
            peers = list(self._peers)
        for peer in peers:
            self._disconnect(peer)
        with self._lock:
            self._closed = True
        for registration in list(self._registrations.values()):
            registration.retire()
        self._wait_parted()
        if not self._worker.close():
            _KEPT.append(self)
            _LOG.error("UCX has not come to an end: the memory of %s stays allocated until this process ends", self.name)
            return
        with self._lock:
            for transfer in self._active + self._quarantine:
                transfer._reading.given_up = True
                transfer._reading.in_flight = 0
                transfer._reading.update()
            self._active, self._quarantine = [], []
            self._registrations.clear()
