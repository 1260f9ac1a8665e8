"""NIXL over UCX: reads between hosts and between accelerators, on whichever of `nixl`, `nixl_cu12`, `nixl_cu13` is installed.

What NIXL 1.5 does, as measured, and what follows from it here:

* A READ that was released, or whose peer was removed, goes on writing into its target. Only completion, failure of the endpoint, or
  destroying the native agent ends it. So a handle is never released while it is unfinished: it stays in the quarantine.
* `check_xfer_state` runs the library's progress for as long as bytes keep coming, and shared-memory reads are copied inside
  `transfer`: one call on 1 GiB lasted up to 3.9 s. So a read is posted in pieces, a bounded number of bytes in flight, and a read that
  is given up posts no more of them.
* A NIXL name that comes back with other metadata is an error for what runs under it. So the native name is random for each agent;
  the agent's own name travels beside it, and a restarted peer is simply another native agent.
* Removing and loading a living peer again leaks two sockets on either side. So a peer that was disconnected stays loaded.
* UCX reuses its TCP connection to a peer, and after a silent cut the kernel sends on it again only when its back-off allows: up to as
  long after the cut as that had lasted (measured: 8 s after one of 20 s). So the agent has UCX give up a connection whose bytes were not
  acknowledged for USER_TIMEOUT seconds (`library`), and makes it anew at the next connect.
* The progress thread never sleeps as the Python API starts it: a core for each agent that serves. Here it sleeps until there is an event
  (`library`).
* The progress thread answers the reads of peers, but on the reading side it fights with polling for the worker's lock (TCP, two
  cores: 0.27 instead of 0.86 GB/s). So an agent that only reads should be made with `serves=False`.

The data port is for trusted networks only: a peer that edits its metadata can read and write memory that was never registered. Nor
does releasing a registration protect it: peers that connected before go on reading, and over TCP a read of memory that has been
unmapped kills the serving process (measured). So staging memory that was ever served stays mapped until the agent is closed.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

from bridge.transfer.agent import Memory, ReadRange, Registration, RemoteMemory
from bridge.transfer.counts import ReadCounters
from bridge.transfer.errors import (
    AgentUnavailable,
    BadRange,
    PeerUnreachable,
    RegistrationFailed,
    TransferFailed,
    TransferTimeout,
)
from bridge.transfer.level_zero import level_zero_in_ucx
from bridge.transfer.names import check_name
from bridge.transfer.nixl.frame import frame_metadata, parse_metadata
from bridge.transfer.nixl.library import BACKEND, UCX_LOG, said, start
from bridge.transfer.nixl.reads import NixlTransfer, Reads
from bridge.transfer.ranges import SEGMENTS, check_memory, check_ranges
from bridge.transfer.ucx_environment import check_transports

MAX_IDLE_PEERS = 1024

_MEND_SECONDS = 1.0


class NixlRegistration:
    """Memory that peers can read, or that reads can be landed in. On a serving agent keep it mapped until the agent is closed."""

    def __init__(self, agent: NixlAgent, memory: Memory, descriptors: Any) -> None:
        self.memory = memory
        self.released = False
        self._agent = agent
        self._descriptors = descriptors

    def release(self) -> None:
        """Idempotent. Raises TransferTimeout while an unfinished read may still write into this memory: it must stay allocated."""
        self._agent._deregister(self)


class NixlPeer:
    """A connected agent of another process. Made by NixlAgent.connect."""

    def __init__(self, agent: NixlAgent, name: str, native: str) -> None:
        self.name = name
        self._agent = agent
        self._native = native
        self._closed = False
        self._failed = False  # stays so when the agent has made the endpoint anew

    @property
    def failure(self) -> str | None:
        """That the endpoint failed, or None."""
        return "its endpoint failed" if self._failed or self._native in self._agent._broken else None

    def read(self, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> NixlTransfer:
        """Starts one read of all ranges (1 to 65,536; a descriptor costs about 4 us). Raises BadRange, TransferFailed."""
        return self._agent._read(self, source, target, ranges)

    def disconnect(self) -> None:
        """Ends the use of this peer, idempotent. Its unfinished reads are given up and go into quarantine.

        NIXL cannot call back a read: what had been asked for (at most `in_flight_bytes` of each read) may still arrive. The targets
        are safe when the read is `settled`, or after NixlAgent.close.
        """
        self._agent._disconnect(self)


class NixlAgent:
    """One process's end of NIXL over UCX. All methods may be called from any thread.

    name: by which peers know it, at most 128 bytes of UTF-8.
    transports: UCX transports to allow, such as ["rc", "cuda_copy", "tcp"]; used only where the environment has no UCX_TLS. On a
        machine with an NVIDIA GPU the list must contain cuda_copy, or UCX refuses to start.
    serves: whether peers read from this agent; a thread of the library then answers them.
    in_flight_bytes: how much one read asks for at a time, at most: the bound on late bytes and on the time that one call takes.
    Raises AgentUnavailable.
    """

    kind = "nixl"

    def __init__(self, name: str, *, transports: Sequence[str] | None = None, serves: bool = True, in_flight_bytes: int = 64 << 20) -> None:
        check_name(name)
        if in_flight_bytes < 4096:
            raise AgentUnavailable("in_flight_bytes is less than 4096", remedy="leave it at its default")
        check_transports(transports)
        self.name = name
        self._native_name = "kv" + secrets.token_hex(7)
        self._lock = threading.RLock()
        self._registrations: list[NixlRegistration] = []
        self._described: bytes | None = None  # what `metadata` says of these
        # Late reads may touch memory that was released long ago: its owners live as long as the agent.
        self._owners: list[object] = []
        self._peers: dict[str, list[NixlPeer]] = {}  # by native name: those that were not disconnected yet
        self._loaded: dict[str, bytes] = {}  # by native name: the blob that NIXL knows
        self._broken: set[str] = set()  # native names whose endpoint failed: NIXL does not connect them anew by itself
        self._native: Any
        self._native, errors, self._tls = start(self._native_name, transports, serves)
        self._reads = Reads(self._native, errors, self._lock, max(4096, in_flight_bytes // 4), self._failed, self._forget)

    # -- what peers and operators ask

    def metadata(self) -> bytes:
        """What a peer needs to connect: valid for memory that is registered when it is called. At most 1 MiB.

        Raises RegistrationFailed when it would be larger, AgentUnavailable after close.
        """
        if (known := self._described) is None:  # else without the lock, which another thread may hold for seconds
            with self._lock:
                known = self._described = frame_metadata(self.name, self._native_name, self._living().get_agent_metadata())
        self._living()
        return known

    def transports(self) -> str:
        """Which transports are allowed and by whom, and, after the first read, those that UCX reports for reads."""
        chosen = UCX_LOG.chosen(self._native_name)
        if chosen:
            return f"{self._tls}; reads go by {'; '.join(chosen)}"
        if UCX_LOG.fd is None:
            return f"{self._tls}; which one is unknown, since UCX's log is configured elsewhere"
        return f"{self._tls}; {'UCX did not say which one its reads took' if self._reads.finished else 'nothing was read yet'}"

    def turned_away(self) -> dict[str, int]:
        """What peers were refused."""
        return {}  # NIXL tells the owner nothing of its readers

    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(registration.memory.nbytes for registration in self._registrations)

    def counters(self) -> ReadCounters:
        """What was read so far."""
        with self._lock:
            return self._reads.counters()

    def progress(self) -> int:
        """Polls the quarantine and forgets what has settled. Returns how many reads are still in it."""
        with self._lock:
            return self._reads.progress()

    # -- memory

    @property
    def devices(self) -> tuple[str, ...]:
        """Whose memory it registers besides the host's: that of Intel GPUs only with a UCX that has Level Zero, which no wheel has."""
        return ("cuda", "xpu") if level_zero_in_ucx() else ("cuda",)

    def register(self, memory: Memory) -> NixlRegistration:
        """Registers memory, which must stay allocated until its release has returned. Raises BadRange, RegistrationFailed."""
        check_memory(memory, "our")
        with self._lock:
            native = self._living()
            try:
                registered = native.register_memory(
                    [(memory.address, memory.nbytes, memory.index, "")], SEGMENTS[memory.device], backends=BACKEND
                )
            except Exception as error:  # the bindings raise types of their own
                raise RegistrationFailed(f"{memory.nbytes} bytes on {memory.device}:{memory.index} were refused: {said(error)}") from error
            registration = NixlRegistration(self, memory, registered)
            self._owners.append(memory.owner)
            self._registrations.append(registration)
            self._described = None
            return registration

    def _deregister(self, registration: NixlRegistration) -> None:
        with self._lock:
            if registration not in self._registrations:
                return
            self._reads.progress()
            if self._reads.into(registration):
                raise TransferTimeout(
                    "memory cannot be released while an unfinished read may write into it", remedy="release or finish its reads first"
                )
            self._living().deregister_memory(registration._descriptors, backends=BACKEND)
            registration.released = True
            self._registrations.remove(registration)
            self._described = None

    # -- peers

    def connect(self, metadata: bytes) -> NixlPeer:
        """Makes a peer known from its metadata. Most transports reach out to it already now, TCP for one.

        The same peer may be connected several times, also with newer metadata. One whose endpoint failed is made anew.
        Raises PeerUnreachable.
        """
        name, native_name, blob = parse_metadata(metadata)
        if native_name == self._native_name:
            raise PeerUnreachable("an agent cannot connect to itself", remedy="use a second agent")
        self._mend(name, native_name)
        with self._lock:
            native = self._living()
            if self._loaded.get(native_name) != blob:
                try:
                    loaded = native.add_remote_agent(blob)
                except Exception as error:  # the bindings raise types of their own
                    if native_name not in self._loaded:
                        self._unload(native_name)  # or what was half loaded would refuse good metadata later
                    raise PeerUnreachable(f"{name} does not answer, or NIXL does not understand its metadata: {said(error)}") from error
                loaded = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
                if loaded != native_name:
                    if loaded not in self._loaded:
                        with contextlib.suppress(Exception):
                            native.remove_remote_agent(loaded)
                    raise PeerUnreachable(f"the metadata of {name} describes another agent")
                self._loaded[native_name] = blob
            peer = NixlPeer(self, name, native_name)
            self._peers.setdefault(native_name, []).append(peer)
            return peer

    def _failed(self, native_name: str) -> None:
        self._broken.add(native_name)
        for peer in self._peers.get(native_name, ()):
            peer._failed = True

    def _mend(self, name: str, native_name: str) -> None:
        """Unloads a remote agent whose endpoint failed, as soon as its reads have all failed with it. Raises PeerUnreachable."""
        deadline = time.monotonic() + _MEND_SECONDS
        while True:
            with self._lock:
                self._living()
                for transfer in self._reads.given_up(native_name):
                    self._reads.advance(transfer)  # which may find out that the endpoint has failed
                if native_name not in self._broken:
                    return
                for transfer in self._reads.of(native_name):
                    self._reads.advance(transfer)
                if not self._reads.of(native_name):
                    self._unload(native_name)
                    return
            if time.monotonic() > deadline:
                raise PeerUnreachable(f"reads over the connection to {name} that failed have not ended yet", remedy="connect again")
            time.sleep(0.01)

    def _disconnect(self, peer: NixlPeer) -> None:
        with self._lock:
            if peer._closed:
                return
            peer._closed = True
            if self._native is None:
                return
            for transfer in [t for t in self._reads.of(peer._native) if t._peer is peer]:
                self._reads.advance(transfer)
                self._reads.give_up(transfer)
            self._peers[peer._native].remove(peer)
            self._forget(peer._native)

    def _forget(self, native_name: str) -> None:
        """Lets go of a remote agent that nobody uses any more.

        A healthy one stays loaded for the next connect: NIXL leaks two sockets on either side each time that a living agent is
        removed and loaded again (measured). While a read is unfinished, removing would only make NIXL lose sight of it.
        """
        if self._native is None or self._peers.get(native_name):
            return
        self._peers.pop(native_name, None)
        if native_name in self._broken and not self._reads.of(native_name):
            self._unload(native_name)
        idle = [name for name in self._loaded if name not in self._peers and not self._reads.of(name)]
        for name in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._unload(name)

    def _unload(self, native_name: str) -> None:
        self._loaded.pop(native_name, None)
        self._broken.discard(native_name)
        with contextlib.suppress(Exception):  # a peer that died may be gone already
            self._native.remove_remote_agent(native_name)

    # -- reads

    def _read(self, peer: NixlPeer, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> NixlTransfer:
        # Without the lock: another thread may hold it for seconds, and whoever reads may be an event loop.
        check_memory(source, "the peer's")
        self._living()
        if peer._closed:
            raise TransferFailed(f"{peer.name} was disconnected", remedy="connect again")
        if peer.failure is not None:
            raise TransferFailed(
                f"the connection to {peer.name} had failed: {peer.failure}", remedy="connect again, with its current metadata"
            )
        if not isinstance(target, NixlRegistration) or target._agent is not self or target.released:
            raise BadRange("the target is not registered with this agent")
        return self._reads.start(peer, source, target, check_ranges(source, target.memory, ranges))

    # -- the end

    def _living(self) -> Any:
        if self._native is None:
            raise AgentUnavailable(f"the agent {self.name} is closed", remedy="make a new one")
        return self._native

    def close(self) -> None:
        """Destroys the native agent, idempotent. Measured: this ends unfinished reads, no byte arrives after it has returned."""
        with self._lock:
            native = self._native
            if native is None:
                return
            if self._reads.end():
                for registration in self._registrations:
                    with contextlib.suppress(Exception):
                        native.deregister_memory(registration._descriptors, backends=BACKEND)
            self._native = None
            self._peers, self._loaded, self._registrations = {}, {}, []
            native.agent = None
            self._owners = []
