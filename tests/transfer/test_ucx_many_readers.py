"""What one reader of a ucx owner does, or leaves half done, holds up no other, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.transfer.agent import ReadRange, RemoteMemory
from tests.transfer import agents
from tests.transfer.serving import MIB, ROOT, Serving, closing, content, memory_of, poisoned, read_all, wait
from tests.transfer.test_release import until_released

pytestmark = pytest.mark.ucxx

RANGES = 1024
PROMPT_SECONDS = 10.0
"""Far more than a free machine takes (0.01 s), and less than what the faults took."""

STOPS_IN_THE_MIDDLE = """
import os, signal, sys
import numpy as np
from bridge.transfer.ucx import wire
from tests.transfer import agents
agent = agents.make("ucx", "half", serves=False, files={})
link = agent.connect(bytes.fromhex(sys.stdin.readline().strip()))._link
print("connected", flush=True)
def say_half():
    agent._worker.send(link._endpoint, [(np.zeros(8192, np.uint8), wire.CONTROL_TAG)], lambda status: None)
    os.kill(os.getpid(), signal.SIGSTOP)  # before the owner can fetch it
agent._worker.call(say_half, 60)
"""


@pytest.fixture
def make():
    with closing(lambda name, **settings: agents.make("ucx", name, serves=False, files={}, **settings)) as made:
        yield made


def seconds_of_a_read(peer, memory, target):
    start = time.monotonic()
    read_all(peer, memory, target, MIB)
    return time.monotonic() - start


def test_a_read_of_many_ranges_that_was_given_up_holds_nobody_up(make):
    """The owner was stopped meanwhile. Its requests once waited for their reader, and everybody behind them: 15 to 958 s."""
    with Serving(4 * MIB, kind="ucx", seed=3) as serving:
        first, second = make("first", patience=1.0), make("second")
        targets = [agent.register(memory_of(poisoned(4 * MIB))) for agent in (first, second)]
        peers = [agent.connect(serving.metadata) for agent in (first, second)]
        for peer, target in zip(peers, targets, strict=True):
            read_all(peer, serving.memory, target, MIB)
        serving.suspend()
        size = 4 * MIB // RANGES
        transfer = peers[0].read(serving.memory, targets[0], [ReadRange(i * size, i * size, size) for i in range(RANGES)])
        until_released(transfer, 10)
        peers[0].disconnect()
        serving.resume()
        assert seconds_of_a_read(peers[1], serving.memory, targets[1]) < PROMPT_SECONDS
        assert seconds_of_a_read(first.connect(serving.metadata), serving.memory, targets[0]) < PROMPT_SECONDS


def test_a_control_message_whose_sender_stops_in_the_middle_holds_nobody_up(make):
    with Serving(4 * MIB, kind="ucx", seed=3) as serving:
        second = make("second")
        target, peer = second.register(memory_of(poisoned(4 * MIB))), second.connect(serving.metadata)
        command = [sys.executable, "-c", STOPS_IN_THE_MIDDLE]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as half:
            try:
                half.stdin.write(serving.metadata.hex() + "\n")
                half.stdin.flush()
                assert half.stdout.readline() == "connected\n"
                limit = time.monotonic() + 20
                while Path(f"/proc/{half.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
                    assert time.monotonic() < limit
                    time.sleep(0.05)
                assert seconds_of_a_read(peer, serving.memory, target) < PROMPT_SECONDS
                third = make("third")
                other = third.register(memory_of(poisoned(4 * MIB)))
                assert seconds_of_a_read(third.connect(serving.metadata), serving.memory, other) < PROMPT_SECONDS
            finally:
                half.kill()


def test_readers_that_leave_in_the_middle_of_a_read_leave_nothing_behind(make):
    """An owner's endpoint notices nothing when a reader closes its own: after 256 of them it refused everybody."""
    owner = agents.make("ucx", "owner", serves=True, files={})
    try:
        data, reader = content(MIB, 3), make("reader")
        owner.register(memory_of(data))
        target, memory = reader.register(memory_of(poisoned(MIB))), RemoteMemory(data.ctypes.data, MIB)
        held = []
        for _ in range(60):
            peer = reader.connect(owner.metadata())
            transfer = peer.read(memory, target, [ReadRange(i * 65536, i * 65536, 65536) for i in range(16)])
            peer.disconnect()
            limit = time.monotonic() + 10
            while not transfer.settled or owner._owner.sessions():
                assert time.monotonic() < limit
                time.sleep(0.005)
            held.append(len(os.listdir("/proc/self/fd")))
        assert max(held[30:]) <= max(held[:10]) + 8
    finally:
        owner.close()


def test_many_small_ranges_arrive_whole(make):
    """They are asked for in many requests."""
    with Serving(4 * MIB, kind="ucx", seed=3) as serving:
        agent, mine = make("reader"), poisoned(4 * MIB)
        target, peer = agent.register(memory_of(mine)), agent.connect(serving.metadata)
        starts = list(range(0, 4 * MIB, 4096))
        transfer = peer.read(serving.memory, target, [ReadRange(at, at, 1000) for at in reversed(starts)])
        wait(transfer)
        transfer.release()
        rows, theirs = mine.reshape(-1, 4096), content(4 * MIB, 3).reshape(-1, 4096)
        assert (rows[:, :1000] == theirs[:, :1000]).all()
        assert (rows[:, 1000:] == 0xCD).all()
