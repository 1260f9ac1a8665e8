"""What an NVIDIA card is, and what of it the hand-off can use."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import torch

from bridge.devices import DeviceError
from bridge.errors import KVBridgeError
from bridge.transfer.agent import Agent, Memory, takes

OLDEST = (8, 0)
"""The kernels' matrix products take bf16 operands, which older cards do not have."""
E4M3_SINCE = (8, 9)
"""vLLM keeps fp8 keys of its slots as E4B15 on older cards. Source: vLLM 0.32, triton_turboquant_decode.py, _use_fp8_e4b15."""


@dataclass(frozen=True)
class Card:
    """One NVIDIA card. driver: the newest CUDA that its driver runs, as torch numbers it (13000 is 13.0). memory: bytes, all and free."""

    index: int
    name: str
    capability: tuple[int, int]
    driver: int
    memory: int
    free: int

    @property
    def slots_hold_e4m3(self) -> bool:
        """Whether the fp8 keys of vLLM's slots on this card are E4M3FN."""
        return self.capability >= E4M3_SINCE

    def __str__(self) -> str:
        driver = f"{self.driver // 1000}.{self.driver % 1000 // 10}"
        size = f"{self.memory / 2**30:.0f} GiB, {self.free / 2**30:.0f} free"
        return (
            f"{self.name} (cuda:{self.index}), compute capability {self.capability[0]}.{self.capability[1]}, CUDA {driver} driver, {size}"
        )


def _driver_version() -> int:
    """The newest CUDA that the driver runs, such as 13000, or 0 where it does not say."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def find_card(index: int) -> Card:
    """The card of this number. Raises DeviceError, with what is missing, where it cannot be used."""
    if torch.version.cuda is None:
        raise DeviceError("this torch was built without CUDA", remedy="install torch for CUDA, or use the device cpu")
    if not torch.cuda.is_available():
        raise DeviceError("no NVIDIA GPU is visible here", remedy="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the device cpu")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}; {torch.cuda.device_count()} are visible", remedy="check CUDA_VISIBLE_DEVICES")
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        raise DeviceError(
            f"compute capability {capability[0]}.{capability[1]} has no bf16 matrix units, the kernels need 8.0",
            remedy="use the device cpu with pages copied to the host",
        )
    free, memory = torch.cuda.mem_get_info(index)
    return Card(index, torch.cuda.get_device_name(index), capability, _driver_version(), memory, free)


def registers(agent: Agent, index: int) -> str:
    """Whether a transfer agent takes this card's memory: "" if it does, else why not. Registers 1 MiB and releases it."""
    if not takes(agent, "cuda"):
        return f"the agent {agent.kind} takes host memory only"
    probe = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{index}")
    try:
        agent.register(Memory(probe.data_ptr(), probe.numel(), "cuda", index, owner=probe)).release()
    except KVBridgeError as error:
        return error.detail
    return ""


def expandable_segments() -> bool:
    """Whether torch's allocator maps memory in pieces, which other processes cannot open and so cannot read through NVLink."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")
