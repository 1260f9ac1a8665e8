"""What one reader of a ucx owner does, or leaves half done, holds up no other, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bridge.transfer.agent import ReadRange, RemoteMemory
from bridge.transfer.ucx import wire
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, ROOT, Serving, closing, content, memory_of, poisoned, read_all, wait
from tests.transfer.test_release import until_released
from tests.waiting import eventually

pytestmark = pytest.mark.ucxx

RANGES = 1024
PROMPT_SECONDS = 10.0
"""Far more than a free machine takes (0.01 s), and less than what the faults took."""

STOPS_IN_THE_MIDDLE = """
import os, signal, sys, threading
import numpy as np
from bridge.transfer.ucx import wire
from tests.transfer import agents
agent = agents.make("ucx", "half", serves=False, files={})
link = agent.connect(bytes.fromhex(sys.stdin.readline().strip()))._link
print("connected", flush=True)
def say(times):
    messages = [(np.zeros(8192, np.uint8), wire.CONTROL_TAG)] * times
    agent._worker.send(link._endpoint, messages, lambda status: said.set())
said = threading.Event()
agent._worker.call(lambda: say(1), 60)  # the endpoint carries such messages from now on
said.wait(60)
def say_half():
    say(int(sys.argv[1]))
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


@contextlib.contextmanager
def stopped_in_the_middle(metadata, messages):
    """Another process, which has stopped in the middle of so many control messages."""
    command = [sys.executable, "-c", STOPS_IN_THE_MIDDLE, str(messages)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as half:
        try:
            half.stdin.write(metadata.hex() + "\n")
            half.stdin.flush()
            assert half.stdout.readline() == "connected\n"
            limit = time.monotonic() + 20
            while Path(f"/proc/{half.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
                assert time.monotonic() < limit
                time.sleep(0.05)
            yield
        finally:
            half.kill()


@pytest.mark.parametrize("messages", [1, 200])
def test_control_messages_whose_sender_stops_in_the_middle_hold_nobody_up(make, messages):
    """One, or more than there are receives for them: the owner was deaf to everybody until their sender was killed."""
    with Serving(4 * MIB, kind="ucx", seed=3) as serving:
        second = make("second")
        target, peer = second.register(memory_of(poisoned(4 * MIB))), second.connect(serving.metadata)
        with stopped_in_the_middle(serving.metadata, messages):
            assert seconds_of_a_read(peer, serving.memory, target) < PROMPT_SECONDS
            third = make("third")
            other = third.register(memory_of(poisoned(4 * MIB)))
            assert seconds_of_a_read(third.connect(serving.metadata), serving.memory, other) < PROMPT_SECONDS
        fourth = make("fourth")
        other = fourth.register(memory_of(poisoned(4 * MIB)))
        assert seconds_of_a_read(fourth.connect(serving.metadata), serving.memory, other) < PROMPT_SECONDS


def test_receives_beyond_the_usual_number_are_given_back(make):
    owner, reader = agents.make("ucx", "owner", serves=True, files={}), make("reader")
    try:
        link, worker, unexpected = reader.connect(owner.metadata())._link, owner._worker, iter([True] * 10)
        worker._unexpected = lambda: next(unexpected, False)
        worker.call(lambda: None, 10)
        assert eventually(lambda: len(worker._control) == 74)
        nonsense = [(np.full(100, 7, np.uint8), wire.CONTROL_TAG)] * 300
        reader._worker.call(lambda: reader._worker.send(link._endpoint, nonsense, lambda status: None), 10)
        assert eventually(lambda: worker.ignored == 300)
        assert len(worker._control) == 64
        make("another").connect(owner.metadata()).disconnect()
    finally:
        owner.close()


def test_an_owner_whose_ucx_tells_of_no_unexpected_messages(make, monkeypatch):
    """Older ucxx have no tag_probe, or one that says only yes or no."""
    owner = agents.make("ucx", "owner", serves=True, files={})
    try:
        worker = owner._worker
        real, asked = worker._worker, []

        class Older:
            def __getattr__(self, name):
                if name == "tag_probe" and not asked:
                    asked.append(name)
                    raise AttributeError(name)
                return (lambda tag: bool(real.tag_probe(tag).matched)) if name == "tag_probe" else getattr(real, name)

        def replace():
            worker._worker = Older()
            assert not worker._unexpected()
            assert not worker._unexpected()

        worker.call(replace, 10)
        assert asked
        make("reader").connect(owner.metadata()).disconnect()
    finally:
        owner.close()


@pytest.mark.parametrize("closing_first", ["reader", "owner"])
def test_closing_in_the_middle_of_a_read_leaves_nothing_behind(closing_first):
    """9 to 17 sockets of either side stayed open for as long as the process lived."""
    data, mine = content(32 * MIB, 3), poisoned(32 * MIB)

    def once():
        owner, reader = (agents.make("ucx", name, serves=name == "owner", files={}) for name in ("owner", "reader"))
        owner.register(memory_of(data))
        target, peer = reader.register(memory_of(mine)), reader.connect(owner.metadata())
        read = peer.read(RemoteMemory(data.ctypes.data, data.nbytes), target, [ReadRange(0, 0, data.nbytes)])
        assert eventually(lambda: read._reading.in_flight)
        for agent in (reader, owner) if closing_first == "reader" else (owner, reader):
            agent.close()
        KEPT.clear()

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        once()
    assert len(os.listdir("/proc/self/fd")) <= before


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
