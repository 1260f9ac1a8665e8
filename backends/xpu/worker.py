"""The emulated XPU's process: the accelerators' host code and the shared kernels, compiled by Intel's Triton, on Intel's CPU runtime.

Started by `emulated.py` with the environment of `environment.py`: python worker.py LINK MEMORY CACHE, two inherited file descriptors and
a folder for builds. It ends when the other end of LINK is closed.
"""

from __future__ import annotations

import socket
import sys
import traceback
from pathlib import Path

# Behind everything else: the folder may be the other environment's site-packages, whose triton is not Intel's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from backends.xpu.described import cache_of, shares_of
from backends.xpu.frames import Call, Done, Failed, SharedMemory, receive_call, send
from backends.xpu.opencl_driver import OpenClDriver, activate
from backends.xpu.tuning import MASK_OPTIONS, TAG_OPTIONS, tuning_for
from bridge.errors import KVBridgeError
from bridge.pages import BlockTable
from bridge.wire import TagKeys

ARCHITECTURE = "pvc"
"""The card whose launch parameters are emulated."""


def _device(driver: OpenClDriver):  # type: ignore[no-untyped-def]
    from backends.accelerator.device import Accelerator  # imports triton's kernels, which the driver has to precede

    class Emulated(Accelerator):
        name = "xpu-emulated"
        tag_options = TAG_OPTIONS
        mask_options = MASK_OPTIONS
        host_masks = 0  # or calls as small as those of tests would never run that kernel

        def probe(self) -> str:
            return (
                f"kernels built by Intel's Triton, run by Intel's OpenCL {driver.runtime.version} on {driver.runtime.name}; {self.report()}"
            )

    return Emulated(torch.device("cpu"), tuning_for(ARCHITECTURE), lanes=1)


def serve(link: socket.socket, memory: SharedMemory, cache: Path) -> None:
    """Answers calls until the client is gone. Raises BadFrame where it sends what is no message."""
    device = _device(activate(cache))
    while (message := receive_call(link)) is not None:
        try:
            if isinstance(message, Call):
                _do(device, message, memory)
                send(link, Done())
            else:
                send(link, Done(device.probe()))
        except KVBridgeError as error:
            send(link, Failed(error.clause, error.detail, error.advice))
        except Exception as error:
            traceback.print_exc()
            send(link, Failed("device", f"the emulated XPU failed: {type(error).__name__}: {str(error)[-2000:]}", "see its error output"))


def _do(device, call: Call, memory: SharedMemory) -> None:  # type: ignore[no-untyped-def]
    memory.map(call.memory)
    cache = cache_of(call.layers, call.first_head, memory.bytes)
    table, shares, keys = BlockTable(call.table, call.block_size), shares_of(call.shares), TagKeys(*call.tags)
    payload = memory.bytes[call.payload[0] : call.payload[0] + call.payload[1]]
    if call.write is None:
        device.pack(cache, table, shares, keys, payload)
    else:
        device.land(cache, table, shares, keys, payload, *call.write)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    serve(link, SharedMemory(int(sys.argv[2])), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
