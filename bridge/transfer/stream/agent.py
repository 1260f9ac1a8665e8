"""The stream agent: reads over TLS 1.3 on TCP, both ends authenticated by pinned certificates. For links that are not trusted.

It is also the reference for what an agent does: cancelling a read really ends its bytes (release never has to wait), a peer reads
what is registered at that moment and nothing else, and releasing memory ends the reads of it. Its price is the processor: encryption
and copies take about a second of a core for each gigabyte on the owner's side, and 1.3 on the reader's (measured on an AMD EPYC).

The address of a peer comes from this host's configuration, chosen by the certificate that the peer's metadata names; only the port is
taken from the metadata, which came over the authenticated control channel.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import ssl
import struct
import threading
from collections.abc import Mapping, Sequence

from bridge.handoff.identity import Identity, PeerConfig, PinnedPeers, certificate_der, client_context, server_context
from bridge.transfer import described
from bridge.transfer.agent import Guard, Memory, ReadRange, Registration, RemoteMemory
from bridge.transfer.counts import ReadCounters, Tally
from bridge.transfer.described import Described, Region
from bridge.transfer.errors import AgentUnavailable, BadRange, PeerUnreachable, TransferFailed, TransferTimeout, no_thread, said
from bridge.transfer.host import check_host, view_of
from bridge.transfer.names import check_name
from bridge.transfer.ranges import check_ranges, pieces_of
from bridge.transfer.stream.owner import Listener
from bridge.transfer.stream.reader import Landing, ReaderConnection, open_connection

_ENDPOINT = struct.Struct("<H32s")  # port (0: does not serve), SHA-256 of the certificate
_PIECE_BYTES = 64 << 20  # a request; the requests of one peer take turns
_RETIRE_SECONDS = 5.0


class StreamRegistration:
    """Memory that peers can read, or that reads land in. Once `release` has returned no peer reads it and nothing lands in it."""

    def __init__(self, agent: StreamAgent, number: int, memory: Memory) -> None:
        self.memory, self.number, self.nbytes = memory, number, memory.nbytes
        self._agent = agent
        self._view = view_of(memory)
        self._changed = threading.Condition()
        self._readers = 0
        self._alive = True
        self.guard: Guard | None = None
        """Says who may read it; without one, every configured peer."""

    def enter(self) -> memoryview | None:
        """For the serving side: the bytes, until `leave`; None after release. Held while a frame is encrypted, never for the network."""
        with self._changed:
            if not self._alive:
                return None
            self._readers += 1
            return self._view[:]

    def leave(self) -> None:
        """Ends what `enter` began."""
        with self._changed:
            self._readers -= 1
            self._changed.notify_all()

    def release(self) -> None:
        """Idempotent. Peers' reads of it fail. Raises TransferTimeout while a read of ours into it is neither finished nor released."""
        self._agent._deregister(self)

    @property
    def alive(self) -> bool:
        """Whether its release has not begun."""
        return self._alive

    def end(self) -> None:
        """Nobody enters any more, and no read into it is started."""
        with self._changed:
            self._alive = False

    def _retire(self) -> None:
        with self._changed:
            self._alive = False
            if not self._changed.wait_for(lambda: not self._readers, timeout=_RETIRE_SECONDS):
                raise TransferTimeout("a frame of this memory is still being encrypted", remedy="call release again")


class StreamTransfer:
    """A read under way. It moves on by itself; `done` only looks."""

    def __init__(self, peer: StreamPeer, target: StreamRegistration, landing: Landing, nbytes: int) -> None:
        self.nbytes = nbytes
        self._peer, self._target, self._landing = peer, target, landing

    @property
    def settled(self) -> bool:
        """Whether no byte of this read can arrive any more."""
        return self._landing.over

    def done(self) -> bool:
        """Whether all bytes have arrived. Raises TransferFailed when the read failed or was given up."""
        landing = self._landing
        if landing.failure is not None:
            raise TransferFailed(f"a read from {self._peer.name} failed: {landing.failure}")
        if landing.given_up:
            raise TransferFailed(f"a read from {self._peer.name} was given up before it had finished")
        return landing.complete

    def release(self) -> None:
        """Gives the read up if it is unfinished. No byte lands afterwards: this never raises TransferTimeout."""
        self._peer._connection.give_up(self._landing)


class StreamPeer:
    """A connected agent of another process. Made by StreamAgent.connect."""

    def __init__(self, agent: StreamAgent, about: Described, connection: ReaderConnection) -> None:
        self.name = about.name
        self._agent, self._regions, self._connection = agent, about.regions, connection
        self._transfers: list[StreamTransfer] = []
        self._closed = False

    @property
    def failure(self) -> str | None:
        """Why the connection ended, or None."""
        return self._connection.failure

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> StreamTransfer:
        """Starts one read of all ranges (1 to 65,536). Raises BadRange, TransferFailed."""
        return self._agent._read(self, source, target, ranges)

    def disconnect(self) -> None:
        """Ends the use of this peer, idempotent. Its unfinished reads are given up; none of their bytes lands afterwards."""
        self._agent._disconnect(self)


class StreamAgent:
    """One process's end. All methods may be called from any thread.

    name: by which peers know it, at most 128 bytes of UTF-8. identity, peers: this host's certificate and key, and the configured peers;
    a peer that is read needs its `host`, the port of the control channel is not used. host, port: where a serving agent listens (0: any
    free port). serves: whether peers read from this agent. connect_seconds: for TCP, TLS and greeting. silence: seconds without a byte of
    a read under way, or in the middle of a frame, after which the connection is failed.
    Raises AgentUnavailable, BadIdentity.
    """

    kind = "stream"

    def __init__(
        self,
        name: str,
        identity: Identity,
        peers: Mapping[str, PeerConfig],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        serves: bool = True,
        connect_seconds: float = 5.0,
        silence: float = 15.0,
    ) -> None:
        check_name(name)
        self.name = name
        self._identity, self._connect_seconds, self._silence = identity, connect_seconds, silence
        self._instance = secrets.token_bytes(described.INSTANCE_BYTES)
        self._fingerprint = hashlib.sha256(certificate_der(identity.certificate)).digest()
        self._configured: dict[bytes, tuple[str, PeerConfig, bytes]] = {}
        for peer_name, peer in peers.items():
            der = certificate_der(peer.certificate)
            self._configured[hashlib.sha256(der).digest()] = peer_name, peer, der
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.RLock()
        self._tally = Tally()
        self._numbers = itertools.count(1)
        self._registrations: dict[int, StreamRegistration] = {}
        self._peers: set[StreamPeer] = set()
        self._connections: dict[bytes, ReaderConnection] = {}  # by the owner's instance
        self._active: list[tuple[Landing, StreamRegistration]] = []
        self._closed = False
        self._cipher = ""
        self._listener: Listener | None = None
        if serves and not host:
            raise AgentUnavailable("no address was given for the data port", remedy="give one; 0.0.0.0 is all of IPv4")
        if serves:
            pinned = PinnedPeers(peers)
            try:
                self._listener = Listener(
                    host,
                    port,
                    server_context(identity, peers),
                    pinned.name_of,
                    self._instance,
                    lambda number: self._registrations.get(number),
                    connect_seconds=connect_seconds,
                    silence=silence,
                )
            except (OSError, OverflowError, ValueError) as error:  # ValueError: a name that is none, such as "a..b"
                raise AgentUnavailable(f"{host}:{port} cannot be opened: {said(error)}", remedy="choose another port or address") from error
            except RuntimeError as error:
                raise no_thread("the data port", error) from error

    # -- what peers and operators ask

    def metadata(self) -> bytes:
        """What a peer needs to connect: valid for memory that is registered when it is called. At most 1 MiB.

        Raises RegistrationFailed when it would be larger, AgentUnavailable after close.
        """
        with self._lock:
            self._living()
            port = self._listener.port if self._listener is not None else 0
            regions = [Region(r.number, r.memory.address, r.nbytes) for r in self._registrations.values()]
        endpoint = _ENDPOINT.pack(port, self._fingerprint)
        return described.encode(Described(self.kind, self.name, self._instance, endpoint, regions))

    def transports(self) -> str:
        """Which cipher carries the bytes, and to which peers."""
        with self._lock:
            links = sorted({f"{c.peer} at {c.address[0]}:{c.address[1]}" for c in self._connections.values() if c.failure is None})
            if not self._cipher:
                return "TLS 1.3 over TCP; nothing was connected yet"
            return f"{self._cipher} over TCP; connected to {', '.join(links) or 'nobody'}"

    def turned_away(self) -> dict[str, int]:
        """What peers were refused."""
        return {"connections": self._listener.refused, "reads": self._listener.refused_reads()} if self._listener is not None else {}

    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(registration.nbytes for registration in self._registrations.values())

    def counters(self) -> ReadCounters:
        """What was read so far. The quarantine is always empty: a read that was given up is over."""
        with self._lock:
            return self._tally.counters(0)

    def progress(self) -> int:
        """How many reads are in quarantine: none, ever."""
        return 0

    # -- memory

    def register(self, memory: Memory) -> StreamRegistration:
        """Registers host memory, which must stay allocated until its release has returned. Raises BadRange."""
        check_host(memory, "our", self.kind)
        with self._lock:
            self._living()
            registration = StreamRegistration(self, next(self._numbers), memory)
            self._registrations[registration.number] = registration
            return registration

    def _deregister(self, registration: StreamRegistration) -> None:
        with self._lock:
            if self._registrations.get(registration.number) is not registration:
                return
            if any(target is registration for _, target in self._active):
                raise TransferTimeout(
                    "memory cannot be released while an unfinished read may write into it", remedy="release or finish its reads first"
                )
            registration.end()  # under the lock that reads are started under
        registration._retire()
        with self._lock:
            self._registrations.pop(registration.number, None)

    # -- peers

    def connect(self, metadata: bytes) -> StreamPeer:
        """Connects and authenticates within `connect_seconds`; peers of one running agent share a connection. Raises PeerUnreachable."""
        about = described.decode(metadata, self.kind)
        if about.instance == self._instance:
            raise PeerUnreachable("an agent cannot connect to itself", remedy="use a second agent")
        with self._lock:
            self._living()
            shared = self._share(about)
        if shared is not None:
            return shared
        connection = self._dial(about)
        with self._lock:
            shared = None if self._closed else self._share(about)  # another thread may have been faster
            if shared is None and not self._closed:
                self._connections[about.instance] = connection
                self._cipher = connection.cipher
                return self._add(about, connection)
        connection.close()
        if shared is not None:
            return shared
        raise self._ended_already()

    def _dial(self, about: Described) -> ReaderConnection:
        if len(about.endpoint) != _ENDPOINT.size:
            raise PeerUnreachable("the peer's metadata holds no endpoint of a stream agent")
        port, fingerprint = _ENDPOINT.unpack(about.endpoint)
        known = self._configured.get(fingerprint)
        if known is None:
            raise PeerUnreachable(
                f"the certificate of {about.name} is not in the configuration",
                remedy="name the peer and its certificate in the configuration",
            )
        name, peer, der = known
        if not peer.host or not port:
            what = "the configuration has no address for" if port else "nothing is served by"
            raise PeerUnreachable(f"{what} {name}", remedy="give its host in the configuration; it must be a prefiller")
        context = self._contexts.get(name)
        if context is None:
            context = self._contexts[name] = client_context(self._identity, peer)  # reads files: not under the lock, which reads take
        return open_connection(
            (peer.host, port), context, der, about.instance, about.name, connect_seconds=self._connect_seconds, silence=self._silence
        )

    def _share(self, about: Described) -> StreamPeer | None:
        connection = self._connections.get(about.instance)
        if connection is None or connection.failure is not None:
            return None
        return self._add(about, connection)

    def _add(self, about: Described, connection: ReaderConnection) -> StreamPeer:
        connection.users += 1
        peer = StreamPeer(self, about, connection)
        self._peers.add(peer)
        return peer

    def _disconnect(self, peer: StreamPeer) -> None:
        with self._lock:
            if peer._closed:
                return
            peer._closed = True
            self._peers.discard(peer)
            transfers, peer._transfers = peer._transfers, []
            connection = peer._connection
            connection.users -= 1
            last = not connection.users
            for instance, other in list(self._connections.items()):
                if last and other is connection:
                    del self._connections[instance]
        for transfer in transfers:
            transfer.release()
        if last:
            connection.close()

    # -- reads

    def _read(self, peer: StreamPeer, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> StreamTransfer:
        check_host(source, "the peer's", self.kind)
        with self._lock:
            self._living()
            if peer._closed:
                raise TransferFailed(f"{peer.name} was disconnected", remedy="connect again")
            if peer._connection.failure is not None:
                raise self._had_failed(peer, peer._connection.failure)
            if not isinstance(target, StreamRegistration) or self._registrations.get(target.number) is not target or not target.alive:
                raise BadRange("the target is not registered with this agent")
            table = check_ranges(source, target.memory, ranges)
            region, start = described.region_of(peer._regions, source, peer.name)
            table[:, 0] += start
            nbytes = int(table[:, 2].sum())
            landing = Landing(target._view, region, pieces_of(table, _PIECE_BYTES), nbytes, self._ended)
            transfer = StreamTransfer(peer, target, landing, nbytes)
            self._tally.started += 1
            self._active.append((landing, target))
            peer._transfers = [t for t in peer._transfers if not t.settled] + [transfer]
        refused = peer._connection.start(landing)
        if refused is not None:
            landing.end(failure=refused)
            raise self._had_failed(peer, refused)
        return transfer

    def _had_failed(self, peer: StreamPeer, reason: str) -> TransferFailed:
        return TransferFailed(f"the connection to {peer.name} had failed: {reason}", remedy="connect again, with its current metadata")

    def _ended(self, landing: Landing, failed: bool, given_up: bool) -> None:
        """Called once for each read, by whoever ends it, before the read says so."""
        with self._lock:
            self._active = [held for held in self._active if held[0] is not landing]
            if failed:
                self._tally.failed += 1
            elif given_up:
                self._tally.given_up += 1
            else:
                self._tally.finished += 1
                self._tally.bytes += landing.nbytes

    # -- the end

    def _living(self) -> None:
        if self._closed:
            raise self._ended_already()

    def _ended_already(self) -> AgentUnavailable:
        return AgentUnavailable(f"the agent {self.name} is closed", remedy="make a new one")

    def close(self) -> None:
        """Ends every connection, idempotent. No byte arrives and no peer reads after it has returned."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers, connections = list(self._peers), list(self._connections.values())
        for peer in peers:
            self._disconnect(peer)
        for connection in connections:
            connection.close()
        if self._listener is not None:
            self._listener.close()
        with self._lock:
            registrations, self._connections = list(self._registrations.values()), {}
        for registration in registrations:
            with contextlib.suppress(TransferTimeout):  # it stays registered: its release says so, and may be called again
                registration._retire()
                self._registrations.pop(registration.number, None)
