"""Metadata that is not whole is refused before NIXL sees it, and what gets past does not end the process."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from bridge.transfer.agent import MAX_METADATA_BYTES
from bridge.transfer.errors import PeerUnreachable
from bridge.transfer.nixl.frame import frame_metadata, parse_metadata
from tests.transfer.nixl_serving import ROOT

FRAME = frame_metadata("prefiller", "kv" + "0" * 14, bytes(range(256)) * 2)


@pytest.mark.parametrize(
    "frame",
    [b"", b"x", FRAME[:-1], FRAME + b"x", FRAME[: len(FRAME) // 2], FRAME[:63], b"\0" * 500, b"x" * (MAX_METADATA_BYTES + 1), None, "text"],
    ids=["empty", "one byte", "cut", "longer", "half", "head cut", "zeros", "too large", "none", "text"],
)
def test_refused(reader, frame):
    with pytest.raises(PeerUnreachable):
        reader.connect(frame)
    assert not reader._loaded


def test_every_flipped_bit_is_refused():
    assert parse_metadata(FRAME)[0] == "prefiller"
    for i in range(8 * len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[i // 8] ^= 1 << i % 8
        with pytest.raises(PeerUnreachable):
            parse_metadata(bytes(damaged))


def test_random_bytes_are_refused():
    source = random.Random(7)
    for _ in range(500):
        with pytest.raises(PeerUnreachable):
            parse_metadata(source.randbytes(source.randrange(2000)))
    head = FRAME[:8]
    for _ in range(500):
        with pytest.raises(PeerUnreachable):
            parse_metadata(head + source.randbytes(source.randrange(2000)))


def test_of_the_agent_itself_and_of_another_native_name(make_agent):
    agent, other = make_agent(serves=True), make_agent("other", serves=True)
    with pytest.raises(PeerUnreachable, match="itself"):
        agent.connect(agent.metadata())
    name, _, blob = parse_metadata(other.metadata())
    with pytest.raises(PeerUnreachable, match="another agent"):
        agent.connect(frame_metadata(name, "kv" + "0" * 14, blob))
    assert not agent._loaded


PROGRAM = """
import random, sys
from bridge.transfer.errors import TransferError
from bridge.transfer.nixl import NixlAgent
from bridge.transfer.nixl.frame import frame_metadata, parse_metadata
agent = NixlAgent("decoder", transports=["tcp"], serves=False)
other = NixlAgent("prefiller", transports=["tcp"])
name, native, blob = parse_metadata(other.metadata())
source, refused, accepted = random.Random(int(sys.argv[1])), 0, 0
damaged = [blob[:n] for n in range(0, len(blob), 16)][1:] + [source.randbytes(n) for n in (1, 100, 1000, 5000)]
for _ in range(40):
    flipped = bytearray(blob)
    flipped[source.randrange(len(blob))] ^= 1 << source.randrange(8)
    damaged.append(bytes(flipped))
for item in damaged:
    try:
        agent.connect(frame_metadata(name, native, item)).disconnect()
        accepted += 1
    except TransferError:
        refused += 1
# NIXL keeps what it half loaded under the damaged name, so that name is lost until its agent restarts; any other is not
restarted = NixlAgent("prefiller", transports=["tcp"])
agent.connect(restarted.metadata()).disconnect()
print(refused, accepted)
"""


def test_damaged_blobs_in_a_whole_frame_do_not_end_the_process():
    """A frame whose digest is right around a blob that is wrong: only a peer does that on purpose."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, "5"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    refused, accepted = map(int, run.stdout.split())
    assert refused >= 20
    assert refused + accepted > 50
