"""A process that reads over an agent, one order a line: where the owner is and how much to read, or the end of the read under way.

Driven by test_cut_in_a_message.py. An order is JSON: {"read": bytes, "metadata": base64, "address": of the owner's memory} is answered when
the read has begun; {"release": seconds} gives it up, and is answered when it has settled, or has not within so many seconds.
"""

from __future__ import annotations

import base64
import json
import sys
import time

from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.errors import TransferTimeout
from tests.transfer import agents
from tests.transfer.serving import POISON, memory_of, poisoned


def settled_within(transfer: object, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            transfer.release()
        except TransferTimeout:
            time.sleep(0.02)
        else:
            return True
    return False


def main() -> None:
    order = json.loads(sys.argv[1])
    agent = agents.make(order["kind"], "decoder", serves=False, files=order["files"], patience=order["patience"])
    mine = poisoned(order["nbytes"])
    target = agent.register(memory_of(mine))
    peer = transfer = None
    for line in sys.stdin:
        told = json.loads(line)
        if "read" in told:
            mine[:] = POISON
            peer = agent.connect(base64.b64decode(told["metadata"]))
            transfer = peer.read(RemoteMemory(told["address"], order["nbytes"]), target, [ReadRange(0, 0, told["read"])])
            print(json.dumps({}), flush=True)
        else:
            settled = settled_within(transfer, told["release"])
            print(json.dumps({"settled": settled, "arrived": int((mine != POISON).sum())}), flush=True)
            peer.disconnect()


if __name__ == "__main__":
    main()
