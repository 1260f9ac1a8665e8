"""Why NIXL's data port is for trusted networks only: a peer that edits the metadata reads and writes memory that was never registered.

Two processes of their own, because the attack may end either. If this test fails since NIXL refuses, docs/security.md can say so.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.transfer.nixl_serving import ROOT

SIZE = 1 << 20

OWNER = """
import json, sys
import numpy as np
from bridge.transfer.agent import Memory
from bridge.transfer.nixl import NixlAgent
SIZE = 1 << 20
ring, secret = np.full(SIZE, 1, np.uint8), np.full(SIZE, 77, np.uint8)
agent = NixlAgent("prefiller", transports=["tcp"])
agent.register(Memory(ring.ctypes.data, SIZE))
say = {"metadata": agent.metadata().hex(), "ring": ring.ctypes.data, "secret": secret.ctypes.data}
print(json.dumps(say), flush=True)
sys.stdin.readline()
print(json.dumps({"secret": secret[:4].tolist()}), flush=True)
"""

ATTACKER = """
import json, struct, sys, time
import numpy as np
from bridge.transfer.nixl import library
from bridge.transfer.nixl.frame import parse_metadata
told = json.loads(sys.stdin.readline())
_, native, blob = parse_metadata(bytes.fromhex(told["metadata"]))
blob = blob.replace(struct.pack("<Q", told["ring"]), struct.pack("<Q", told["secret"]))
api = library.load()
agent = api.nixl_agent("attacker", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
mine = np.zeros(4096, np.uint8)
agent.register_memory([(mine.ctypes.data, 4096, 0, "")], "DRAM")
peer = agent.add_remote_agent(blob)
def move(operation):
    local = agent.get_xfer_descs([(mine.ctypes.data, 4096, 0)], "DRAM")
    remote = agent.get_xfer_descs([(told["secret"], 4096, 0)], "DRAM")
    handle = agent.initialize_xfer(operation, local, remote, peer, b"")
    state, limit = agent.transfer(handle), time.monotonic() + 20
    while state == "PROC" and time.monotonic() < limit:
        state = agent.check_xfer_state(handle)
    return state
states = [move("READ")]
read = mine[:4].tolist()
mine[:] = 99
states.append(move("WRITE"))
print(json.dumps({"states": states, "read": read}), flush=True)
"""


def start(program: str) -> subprocess.Popen:
    import os

    environment = dict(os.environ, UCX_TLS="tcp", PYTHONPATH=str(ROOT))
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_edited_metadata_reads_and_writes_unregistered_memory():
    owner, attacker = start(OWNER), start(ATTACKER)
    try:
        assert owner.stdout is not None
        told = owner.stdout.readline()
        out, _ = attacker.communicate(told, timeout=60)
        result = json.loads(out.splitlines()[-1])
        assert result == {"states": ["DONE", "DONE"], "read": [77] * 4}, (
            "NIXL no longer lets an edited blob through: update docs/security.md"
        )
        after, _ = owner.communicate("\n", timeout=30)
        assert json.loads(after)["secret"] == [99] * 4
    finally:
        for process in (owner, attacker):
            process.kill()
            process.wait(10)
