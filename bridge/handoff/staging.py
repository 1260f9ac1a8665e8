"""A fixed budget of registered memory, handed out in contiguous extents. Whoever finds it full waits or refuses; nothing grows."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from bridge.devices import Buffer, Device, DeviceWithMemory, StagingMemory
from bridge.handoff.errors import BadBounds, StagingFull
from bridge.transfer.agent import Agent, Guard, GuardedRegistration, Memory, Registration, takes
from bridge.transfer.errors import RegistrationFailed

ALIGNMENT = 4096

Where = Literal["auto", "host", "device"]
"""Where payloads are staged: "device" is the device's own memory, "auto" that, if the transfer agent can register it, else the host's."""


@dataclass(frozen=True)
class Extent:
    """`nbytes` of the staging memory from byte `offset` on."""

    offset: int
    nbytes: int


class StagingPool:
    """First fit over free extents, merged when given back. Safe for several threads.

    capacity: bytes of the memory. An extent whose transfer is unfinished is quarantined: it counts as used until its `settled` says that
    no byte can arrive any more, which is asked where room is wanted and by `settle`. Raises StagingFull for a budget of less than a page.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < ALIGNMENT:
            raise StagingFull(f"a staging budget of {capacity} bytes holds nothing", remedy="give some hundred megabytes")
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._free: list[tuple[int, int]] = [(0, self.capacity)]
        self._quarantine: list[tuple[Extent, Callable[[], bool]]] = []
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are not free: taken or quarantined."""
        with self._changed:
            return self.capacity - sum(size for _, size in self._free)

    @property
    def quarantined(self) -> int:
        """Bytes under unfinished transfers that nobody waits for."""
        with self._changed:
            return sum(_round_up(extent.nbytes) for extent, _ in self._quarantine)

    def try_take(self, nbytes: int) -> Extent | None:
        """An extent of `nbytes`, or None when there is no room now. Raises StagingFull if there can never be."""
        size = _round_up(nbytes)
        if size > self.capacity:
            raise StagingFull(f"a chunk of {nbytes} bytes is larger than the whole staging budget of {self.capacity}")
        extent = self._first_fit(nbytes, size)
        if extent is None and self.settle():
            extent = self._first_fit(nbytes, size)
        return extent

    def _first_fit(self, nbytes: int, size: int) -> Extent | None:
        with self._changed:
            for position, (offset, free) in enumerate(self._free):
                if free >= size:
                    if free == size:
                        del self._free[position]
                    else:
                        self._free[position] = (offset + size, free - size)
                    return Extent(offset, nbytes)
        return None

    def take(self, nbytes: int, timeout: float, wanted: Callable[[], bool] = lambda: True) -> Extent:
        """An extent of `nbytes`, waiting for room up to `timeout` seconds and no longer than it is `wanted`. Raises StagingFull."""
        deadline = time.monotonic() + timeout
        while True:
            extent = self.try_take(nbytes)
            if extent is not None:
                return extent
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not wanted():
                raise StagingFull(f"no room for {nbytes} bytes within {timeout} s ({self.used} of {self.capacity} in use)")
            with self._changed:
                # Quarantined extents settle without a notification, hence the short wait.
                self._changed.wait(min(remaining, 0.05))

    def give_back(self, extent: Extent) -> None:
        """Frees an extent. Each extent is given back exactly once."""
        with self._changed:
            self._insert(extent)
            self._changed.notify_all()

    def quarantine(self, extent: Extent, settled: Callable[[], bool]) -> None:
        """Frees an extent as soon as `settled()` is true; until then bytes may still arrive in it."""
        with self._changed:
            self._quarantine.append((extent, settled))

    def settle(self) -> bool:
        """Frees what is quarantined and can be written no more. Whether that was anything. Asks the transfers, outside the lock."""
        with self._changed:
            waiting = list(self._quarantine)
        settled = [one for one in waiting if one[1]()]
        with self._changed:
            freed = [one for one in settled if one in self._quarantine]  # not what another thread has freed meanwhile
            for one in freed:
                self._quarantine.remove(one)
                self._insert(one[0])
            if freed:
                self._changed.notify_all()
        return bool(freed)

    def _insert(self, extent: Extent) -> None:
        insort(self._free, (extent.offset, _round_up(extent.nbytes)))
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged


@dataclass(frozen=True)
class Staging:
    """A budget of memory in one place, registered with the transfer agent."""

    pool: StagingPool
    memory: StagingMemory
    registration: Registration

    @classmethod
    def open(cls, device: Device, agent: Agent, pool: StagingPool, where: Where, guard: Guard) -> Staging:
        """Allocates and registers the pool's bytes; an agent that knows who reads then asks `guard`.

        Raises DeviceError, RegistrationFailed where the agent does not take the memory, and BadBounds for a place that there is not.
        """
        if where not in get_args(Where):
            raise BadBounds(f"there is no place to stage payloads called {where!r}", remedy=f"choose one of {', '.join(get_args(Where))}")
        if where == "host" or (where == "auto" and not can_stage_in_device(device, agent)):
            memory = device.allocate_staging(pool.capacity)
        elif not isinstance(device, DeviceWithMemory):
            raise RegistrationFailed(f"the device {device.name} has no memory of its own to stage in", remedy='choose staging="host"')
        elif not takes(agent, device.memory):
            raise RegistrationFailed(
                f"the transfer agent {agent.kind} does not take {device.memory} memory", remedy='choose staging="host"'
            )
        else:
            memory = device.allocate_memory(pool.capacity)
        described = Memory(memory.address, memory.nbytes, memory.device, memory.index, owner=memory)
        registration = agent.register(described)
        if isinstance(registration, GuardedRegistration):
            registration.guard = guard
        return cls(pool, memory, registration)

    def view(self, extent: Extent, nbytes: int) -> Buffer:
        """The first `nbytes` bytes of an extent."""
        return self.memory.bytes()[extent.offset : extent.offset + nbytes]


def can_stage_in_device(device: Device, agent: Agent) -> bool:
    """Whether payloads can be staged in the device's own memory."""
    return isinstance(device, DeviceWithMemory) and device.memory != "cpu" and takes(agent, device.memory)


def _round_up(nbytes: int) -> int:
    return max(nbytes + ALIGNMENT - 1, ALIGNMENT) // ALIGNMENT * ALIGNMENT
