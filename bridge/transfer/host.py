"""Host memory by its address, for the agents that move bytes themselves."""

from __future__ import annotations

import ctypes

from bridge.transfer.agent import Memory, RemoteMemory
from bridge.transfer.errors import BadRange
from bridge.transfer.ranges import check_memory


def check_host(memory: Memory | RemoteMemory, whose: str, kind: str) -> None:
    """Raises BadRange for memory that cannot be, or is not the host's."""
    if memory.device != "cpu":
        raise BadRange(
            f"{whose} memory is on {memory.device!r}; the {kind} agent moves host memory only", remedy="stage in host memory, or use nixl"
        )
    check_memory(memory, whose)


def view_of(memory: Memory) -> memoryview:
    """The bytes at `memory`, writable. They must stay mapped for as long as the view is used."""
    return memoryview((ctypes.c_ubyte * memory.nbytes).from_address(memory.address)).cast("B")
