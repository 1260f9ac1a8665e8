"""What the ucx agent does with a read that was given up: bounded bytes, a bounded wait, and only its own link suffers."""

from __future__ import annotations

import threading
import time

import pytest

from bridge.transfer.errors import TransferFailed, TransferTimeout
from tests.transfer import agents
from tests.transfer.serving import KEPT, MIB, POISON, Serving, memory_of, poisoned, read_all
from tests.transfer.test_release import SIZE, start_and_suspend, until_released

pytestmark = pytest.mark.ucxx


@pytest.fixture
def agent(request):
    """A parameter: its patience."""
    made = agents.make("ucx", "decoder", serves=False, files={}, in_flight_bytes=4 * MIB, patience=getattr(request, "param", 1.0))
    yield made
    made.close()
    KEPT.clear()


def test_an_owner_that_hangs_loses_its_endpoint_and_nothing_arrives_later(agent):
    with Serving(SIZE, kind="ucx") as serving, Serving(MIB, kind="ucx", name="another") as another:
        other, small = agent.connect(another.metadata), agent.register(memory_of(poisoned(MIB)))
        mine = poisoned(SIZE)
        target, peer, transfer = start_and_suspend(agent, serving, mine)
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            transfer.release()
        until_released(transfer)
        assert time.monotonic() - started > 0.9, "the owner got no time to answer"
        mine[:] = POISON
        target.release()
        serving.resume()
        time.sleep(0.5)
        assert (mine == POISON).all()
        with pytest.raises(TransferFailed, match="connect again"):
            peer.read(serving.memory, small, [])
        read_all(other, another.memory, small, MIB)
        read_all(agent.connect(serving.metadata), serving.memory, small, MIB)


@pytest.mark.parametrize("agent", [25.0], indirect=True)
def test_the_last_disconnect_ends_its_reads_at_once(agent):
    """And not only after its patience."""
    with Serving(SIZE, kind="ucx") as serving:
        mine = poisoned(SIZE)
        _, peer, transfer = start_and_suspend(agent, serving, mine)
        peer.disconnect()
        started = time.monotonic()
        until_released(transfer)
        assert time.monotonic() - started < 12
        mine[:] = POISON
        serving.resume()
        time.sleep(0.5)
        assert (mine == POISON).all()


def test_a_release_is_short_and_typed_while_the_worker_is_busy(agent):
    """Its thread closes endpoints of silent peers, for seconds each. A release then raised TimeoutError, after ten seconds."""
    with Serving(SIZE, kind="ucx") as serving:
        _, _, transfer = start_and_suspend(agent, serving, poisoned(SIZE))
        free = threading.Event()
        agent._worker.post(lambda: free.wait(60))
        started = time.monotonic()
        with pytest.raises(TransferTimeout):
            transfer.release()
        assert time.monotonic() - started < 5
        free.set()
        serving.resume()
        until_released(transfer)


def test_an_owner_whose_reader_takes_nothing_gives_its_memory_back():
    """Releasing on the serving side ends the sends that a hanging reader does not take."""
    import subprocess
    import sys

    program = """
import sys, time
from tests.transfer import agents
from tests.transfer.serving import MIB, memory_of, poisoned
from bridge.transfer.agent import ReadRange, RemoteMemory
agent = agents.make("ucx", "decoder", serves=False, files={})
address = int(sys.stdin.readline())
peer = agent.connect(bytes.fromhex(sys.stdin.readline().strip()))
target = agent.register(memory_of(poisoned(64 * MIB)))
read = peer.read(RemoteMemory(address, 64 * MIB), target, [ReadRange(0, 0, 64 * MIB)])
while (target.array[:16] == 0xCD).all():
    time.sleep(0.0001)
print("reading", flush=True)
time.sleep(60)
"""
    from tests.transfer.serving import ROOT

    owner = agents.make("ucx", "prefiller", serves=True, files={})
    theirs = poisoned(64 * MIB)
    theirs[:] = 1
    registration = owner.register(memory_of(theirs))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        process.stdin.write(f"{theirs.ctypes.data}\n{owner.metadata().hex()}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "reading\n"
        process.send_signal(19)  # SIGSTOP
        started = time.monotonic()
        registration.release()
        assert time.monotonic() - started < 8
        assert owner.registered_bytes() == 0
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()
        owner.close()
        KEPT.clear()
