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
* The progress thread answers the reads of peers, but on the reading side it fights with polling for the worker's lock (TCP, two
  cores: 0.27 instead of 0.86 GB/s). So an agent that only reads should be made with `serves=False`.

The data port is for trusted networks only: a peer that edits its metadata can read and write memory that was never registered. Nor
does releasing a registration protect it: peers that connected before go on reading, and over TCP a read of memory that has been
unmapped kills the serving process (measured). So staging memory that was ever served stays mapped until the agent is closed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bridge.transfer.agent import Memory, ReadRange, Registration, RemoteMemory
from bridge.transfer.errors import (
    AgentUnavailable,
    BadRange,
    PeerUnreachable,
    RegistrationFailed,
    TransferFailed,
    TransferTimeout,
)
from bridge.transfer.nixl import library
from bridge.transfer.nixl.frame import MAX_NAME_BYTES, frame_metadata, parse_metadata
from bridge.transfer.nixl.library import INSTALL, UCX_LOG, environment, said, why_ucx_refuses
from bridge.transfer.ranges import SEGMENTS, check_memory, check_ranges, descriptors, pieces_of

MAX_IDLE_PEERS = 1024

_BACKEND = ["UCX"]
_STARTING = threading.Lock()  # environment variables are the process's


@dataclass(frozen=True)
class NixlCounters:
    """What an agent has done so far: started = finished + failed + given up + those under way."""

    reads_started: int
    reads_finished: int
    reads_failed: int
    reads_given_up: int
    """Released or disconnected before they had finished."""
    reads_quarantined: int
    """Of those given up: with bytes that might still arrive."""
    bytes_read: int
    """By finished reads."""
    in_quarantine: int
    """Reads that are in quarantine now."""


class _Tally:
    """The mutable side of NixlCounters, changed under the agent's lock."""

    def __init__(self) -> None:
        self.started = self.finished = self.failed = self.given_up = self.quarantined = self.bytes = 0


class NixlRegistration:
    """Memory that peers can read, or that reads can be landed in. On a serving agent keep it mapped until the agent is closed."""

    def __init__(self, agent: NixlAgent, memory: Memory, descriptors: Any) -> None:
        self.memory = memory
        self._agent = agent
        self._descriptors = descriptors

    def release(self) -> None:
        """Idempotent. Raises TransferTimeout while an unfinished read may still write into this memory: it must stay allocated."""
        self._agent._deregister(self)


class NixlTransfer:
    """A read under way, in pieces. Made by NixlPeer.read."""

    def __init__(self, peer: NixlPeer, source: RemoteMemory, target: NixlRegistration, pieces: list[np.ndarray], nbytes: int) -> None:
        self.nbytes = nbytes
        self._peer = peer
        self._source = source
        self._target = target
        self._waiting = pieces[::-1]  # the next piece is the last
        self._in_flight: list[Any] = []
        self._failure: str | None = None
        self._given_up = False
        self._posted = False
        self._counted = False

    @property
    def settled(self) -> bool:
        """Whether no byte of this read can arrive any more."""
        return not self._in_flight and (not self._waiting or self._given_up or self._failure is not None)

    def done(self) -> bool:
        """Whether all bytes have arrived; also asks for the next pieces, so it must be polled.

        Takes at most as long as it takes to copy what is in flight. Raises TransferFailed when the read failed or was given up.
        """
        agent = self._peer._agent
        if not self.settled and agent._lock.acquire(timeout=0.005):
            try:
                agent._advance(self)
            finally:
                agent._lock.release()
        if self._failure is not None:
            raise TransferFailed(f"a read from {self._peer.name} failed: {self._failure}")
        if self._given_up:
            raise TransferFailed(f"a read from {self._peer.name} was given up before it had finished")
        return self.settled

    def release(self) -> None:
        """Gives the handle back; an unfinished read is given up: no further byte is asked for.

        Raises TransferTimeout while bytes may still arrive. The read then is in the agent's quarantine and its target must not be
        reused; call again later (or `NixlAgent.progress`): it returns when the target is safe.
        """
        self._peer._agent._release(self)


class NixlPeer:
    """A connected agent of another process. Made by NixlAgent.connect."""

    def __init__(self, agent: NixlAgent, name: str, native: str) -> None:
        self.name = name
        self._agent = agent
        self._native = native
        self._closed = False

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
    devices = ("cuda",)
    """Whose memory its wheels register; that of Intel GPUs they do not."""

    def __init__(self, name: str, *, transports: Sequence[str] | None = None, serves: bool = True, in_flight_bytes: int = 64 << 20) -> None:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise AgentUnavailable(f"an agent's name has 1 to {MAX_NAME_BYTES} bytes", remedy="choose a shorter name")
        if in_flight_bytes < 4096:
            raise AgentUnavailable("in_flight_bytes is less than 4096", remedy="leave it at its default")
        if transports is not None and (not transports or not all(re.fullmatch(r"[\w^:\\/]+", item) for item in transports)):
            raise AgentUnavailable(
                f"{list(transports)!r} is no list of UCX transports", remedy='name them as UCX does, such as ["tcp", "cuda_copy"]'
            )
        self.name = name
        self._native_name = "kv" + secrets.token_hex(7)
        self._piece_bytes = max(4096, in_flight_bytes // 4)
        self._lock = threading.RLock()
        self._tally = _Tally()
        self._registrations: list[NixlRegistration] = []
        # Late reads may touch memory that was released long ago: its owners live as long as the agent.
        self._owners: list[object] = []
        self._peers: dict[str, list[NixlPeer]] = {}  # by native name: those that were not disconnected yet
        self._loaded: dict[str, bytes] = {}  # by native name: the blob that NIXL knows
        self._broken: set[str] = set()  # native names whose endpoint failed: NIXL does not connect them anew by itself
        self._active: list[NixlTransfer] = []
        self._quarantine: list[NixlTransfer] = []
        self._native: Any = None
        with _STARTING:
            self._start(transports, serves)

    def _start(self, transports: Sequence[str] | None, serves: bool) -> None:
        from_environment = os.environ.get("UCX_TLS")
        tls = from_environment if from_environment is not None else ",".join(transports) if transports is not None else None
        if tls is None:
            self._tls = "UCX chooses among all its transports"
        else:
            where = "the environment" if from_environment is not None else "the configuration"
            ignored = ", which overrides the configuration" if from_environment is not None and transports is not None else ""
            self._tls = f"UCX_TLS={tls} from {where}{ignored}"
        with UCX_LOG.opened_while_loading(), environment({"NIXL_LOG_LEVEL": "FATAL"} | ({} if tls is None else {"UCX_TLS": tls})):
            api = library.load()
            reason = None
            try:
                config = api.nixl_agent_config(enable_prog_thread=serves, backends=_BACKEND)
                native = api.nixl_agent(self._native_name, config)
                if "UCX" not in native.backends:
                    reason = "this NIXL has no UCX back end"
            except Exception as error:  # the bindings raise types of their own and RuntimeError
                reason = said(error)
        if reason is not None:
            reason = why_ucx_refuses(api.__name__, tls) or reason
            raise AgentUnavailable(
                f"NIXL's UCX back end refuses to start ({self._tls}): {reason}",
                remedy="correct UCX_TLS or the configured transports (a host with an NVIDIA GPU needs cuda_copy among them), or " + INSTALL,
            )
        self._errors = importlib.import_module(api.__name__.replace("_api", "_bindings"))
        self._native = native

    # -- what peers and operators ask

    def metadata(self) -> bytes:
        """What a peer needs to connect: valid for memory that is registered when it is called. At most 1 MiB.

        Raises RegistrationFailed when it would be larger, AgentUnavailable after close.
        """
        with self._lock:
            return frame_metadata(self.name, self._native_name, self._living().get_agent_metadata())

    def transports(self) -> str:
        """Which transports are allowed and by whom, and, after the first read, those that UCX reports for reads."""
        chosen = UCX_LOG.chosen(self._native_name)
        if chosen:
            return f"{self._tls}; reads go by {'; '.join(chosen)}"
        if UCX_LOG.fd is None:
            return f"{self._tls}; which one is unknown, since UCX's log is configured elsewhere"
        with self._lock:
            read = self._tally.finished
        return f"{self._tls}; {'UCX did not say which one its reads took' if read else 'nothing was read yet'}"

    def registered_bytes(self) -> int:
        """Bytes that are registered now."""
        with self._lock:
            return sum(registration.memory.nbytes for registration in self._registrations)

    def counters(self) -> NixlCounters:
        with self._lock:
            t = self._tally
            return NixlCounters(t.started, t.finished, t.failed, t.given_up, t.quarantined, t.bytes, len(self._quarantine))

    def progress(self) -> int:
        """Polls the quarantine and forgets what has settled. Returns how many reads are still in it."""
        with self._lock:
            for transfer in list(self._quarantine):
                self._advance(transfer)
            return len(self._quarantine)

    # -- memory

    def register(self, memory: Memory) -> NixlRegistration:
        """Registers memory, which must stay allocated until its release has returned. Raises BadRange, RegistrationFailed."""
        check_memory(memory, "our")
        with self._lock:
            native = self._living()
            try:
                registered = native.register_memory(
                    [(memory.address, memory.nbytes, memory.index, "")], SEGMENTS[memory.device], backends=_BACKEND
                )
            except Exception as error:  # the bindings raise types of their own
                raise RegistrationFailed(f"{memory.nbytes} bytes on {memory.device}:{memory.index} were refused: {said(error)}") from error
            registration = NixlRegistration(self, memory, registered)
            self._owners.append(memory.owner)
            self._registrations.append(registration)
            return registration

    def _deregister(self, registration: NixlRegistration) -> None:
        with self._lock:
            if registration not in self._registrations:
                return
            self.progress()
            for transfer in self._active + self._quarantine:
                if transfer._target is registration:
                    raise TransferTimeout("memory cannot be released while an unfinished read may write into it")
            self._living().deregister_memory(registration._descriptors, backends=_BACKEND)
            self._registrations.remove(registration)

    # -- peers

    def connect(self, metadata: bytes) -> NixlPeer:
        """Makes a peer known from its metadata. Most transports reach out to it already now, TCP for one.

        The same peer may be connected several times, also with newer metadata. Raises PeerUnreachable.
        """
        name, native_name, blob = parse_metadata(metadata)
        if native_name == self._native_name:
            raise PeerUnreachable("an agent cannot connect to itself", remedy="use a second agent")
        with self._lock:
            native = self._living()
            self.progress()
            if native_name in self._broken and not self._in_use(native_name):
                self._unload(native_name)
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

    def _disconnect(self, peer: NixlPeer) -> None:
        with self._lock:
            if peer._closed:
                return
            peer._closed = True
            for transfer in [t for t in self._active if t._peer is peer]:
                self._advance(transfer)
                self._give_up(transfer)
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
        if native_name in self._broken and not self._in_use(native_name):
            self._unload(native_name)
        idle = [name for name in self._loaded if name not in self._peers and not self._in_use(name)]
        for name in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._unload(name)

    def _in_use(self, native_name: str) -> bool:
        return any(t._peer._native == native_name for t in self._active + self._quarantine)

    def _unload(self, native_name: str) -> None:
        self._loaded.pop(native_name, None)
        self._broken.discard(native_name)
        with contextlib.suppress(Exception):  # a peer that died may be gone already
            self._native.remove_remote_agent(native_name)

    # -- reads

    def _read(self, peer: NixlPeer, source: RemoteMemory, target: Registration, ranges: Sequence[ReadRange]) -> NixlTransfer:
        check_memory(source, "the peer's")
        with self._lock:
            self._living()
            if peer._closed:
                raise TransferFailed(f"{peer.name} was disconnected")
            if peer._native in self._broken:
                raise TransferFailed(f"the connection to {peer.name} had failed", remedy="connect again, with its current metadata")
            if not isinstance(target, NixlRegistration) or target not in self._registrations:
                raise BadRange("the target is not registered with this agent")
            table = check_ranges(source, target.memory, ranges)
            if self._quarantine:
                self.progress()
            nbytes = int(table[:, 2].sum())
            transfer = NixlTransfer(peer, source, target, pieces_of(table, self._piece_bytes), nbytes)
            self._tally.started += 1
            self._active.append(transfer)
            try:
                self._post(transfer)
            except BadRange:
                self._active.remove(transfer)
                self._tally.started -= 1
                raise
            self._settle(transfer)
            if transfer._failure is not None and transfer.settled:
                raise TransferFailed(f"a read from {peer.name} failed: {transfer._failure}")
            return transfer

    def _post(self, transfer: NixlTransfer) -> None:
        """Asks for as many pieces as may be in flight."""
        native, source, target = self._native, transfer._source, transfer._target.memory
        for _ in range(4 - len(transfer._in_flight)):
            if not transfer._waiting:
                return
            remote, local, nbytes = transfer._waiting[-1].T
            try:
                handle = native.initialize_xfer(
                    "READ",
                    native.get_xfer_descs(descriptors(target.address, local, nbytes, target.index), SEGMENTS[target.device]),
                    native.get_xfer_descs(descriptors(source.address, remote, nbytes, source.index), SEGMENTS[source.device]),
                    transfer._peer._native,
                    b"",
                    _BACKEND,
                )
            except self._errors.nixlNotFoundError as error:
                if transfer._posted:
                    transfer._failure = "the peer has not registered all of these bytes"
                    return
                raise BadRange(f"{transfer._peer.name} has not registered these bytes") from error
            except Exception as error:  # the bindings raise types of their own
                transfer._failure = said(error)
                return
            transfer._waiting.pop()
            transfer._posted = True
            try:
                state = native.transfer(handle)
            except Exception as error:
                # some of its descriptors may have been posted before the error, so the handle must settle like any other
                transfer._failure = said(error)
                transfer._in_flight.append(handle)
                return
            if state == "DONE":
                native.release_xfer_handle(handle)
            else:
                transfer._in_flight.append(handle)

    def _advance(self, transfer: NixlTransfer) -> None:
        """Polls one read and asks for its next pieces."""
        native = self._native
        if native is None or transfer.settled:
            self._settle(transfer)
            return
        unfinished = []
        for handle in transfer._in_flight:
            try:
                state = native.check_xfer_state(handle)
            except Exception as error:  # the bindings raise types of their own
                state, transfer._failure = "ERR", transfer._failure or said(error)
            if state == "PROC":
                unfinished.append(handle)
                continue
            if state == "ERR":
                transfer._failure = transfer._failure or "NIXL reports an error"
            with contextlib.suppress(Exception):
                native.release_xfer_handle(handle)
        transfer._in_flight = unfinished
        if transfer._failure is None and not transfer._given_up:
            self._post(transfer)
        self._settle(transfer)

    def _settle(self, transfer: NixlTransfer) -> None:
        """Counts the outcome of a read, once, and takes a read that has ended off the lists."""
        if not transfer._counted and (transfer.settled or transfer._given_up):
            transfer._counted = True
            if transfer._failure is not None:
                self._tally.failed += 1
                self._broken.add(transfer._peer._native)
            elif transfer._given_up:
                self._tally.given_up += 1
            else:
                self._tally.finished += 1
                self._tally.bytes += transfer.nbytes
        if transfer.settled:
            for held in (self._active, self._quarantine):
                if transfer in held:
                    held.remove(transfer)
                    self._forget(transfer._peer._native)

    def _give_up(self, transfer: NixlTransfer) -> None:
        if transfer._given_up or transfer.settled:
            return
        transfer._given_up = True
        if transfer._in_flight:
            self._tally.quarantined += 1
            self._active.remove(transfer)
            self._quarantine.append(transfer)
        self._settle(transfer)

    def _release(self, transfer: NixlTransfer) -> None:
        with self._lock:
            if self._native is None:
                return
            if not transfer._given_up:
                self._give_up(transfer)
            self._advance(transfer)
            if not transfer.settled:
                raise TransferTimeout(f"a read from {transfer._peer.name} is unfinished and its bytes may still arrive")

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
            unfinished = self._active + self._quarantine
            for transfer in unfinished:
                transfer._given_up = True
                self._settle(transfer)
            if not unfinished:
                for registration in self._registrations:
                    with contextlib.suppress(Exception):
                        native.deregister_memory(registration._descriptors, backends=_BACKEND)
            self._native = None
            self._peers, self._loaded = {}, {}
            # handles before their agent: each holds it alive
            for transfer in unfinished:
                transfer._in_flight = []
            self._active, self._quarantine, self._registrations = [], [], []
            native.agent = None
            self._owners = []
