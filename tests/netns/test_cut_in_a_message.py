"""A link cut while part of one message had arrived: the read settles, so that its target can be used again.

UCX never completes a receive of which some pieces had come unasked when the endpoint was closed; messages are therefore asked for.
"""

import base64
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import links
from tests.transfer import agents
from tests.transfer.serving import ROOT, Serving
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.netns, pytest.mark.ucxx]

LARGEST = 4_000_000
CROSSING_SECONDS = (0.6, 0.6, 1.2, 2.4, 4.8)
"""Of one message, in each attempt to cut it in the middle: where this machine was late with the cut, it has longer."""
GIVEN_UP_SECONDS = 1.0
"""The agent's own patience with a read that was given up."""


def rate_for(nbytes, seconds):
    return f"{int(nbytes * 8 / seconds)}bit"


def told(process, **order):
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    assert line, f"the reader ended, {process.wait(PATIENCE)}"
    return json.loads(line)


@pytest.mark.timeout(240)
def test_a_ucx_read_cut_in_the_middle_of_a_message_settles():
    """Without the rendezvous none of these ever settled."""
    order = {"kind": "ucx", "files": agents.identities(), "nbytes": LARGEST, "patience": GIVEN_UP_SECONDS}
    seen = {}
    with links.network() as net:

        def within(role):
            return ["ip", "netns", "exec", net.names[role]]

        command = [*within("decoder"), sys.executable, "-m", "tests.netns.reading", json.dumps(order)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with (
            Serving(LARGEST, kind="ucx", within=within("prefiller")) as serving,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as reader,
        ):
            where = {"metadata": base64.b64encode(serving.metadata).decode(), "address": serving.memory.address}
            try:
                for nbytes in (300_000, 400_000, 1_000_000, LARGEST):
                    for seconds in CROSSING_SECONDS:
                        net.shape(None)
                        told(reader, read=64, **where)  # so that the connection is made at full speed
                        assert told(reader, release=PATIENCE)["settled"]
                        net.shape(rate_for(nbytes, seconds), burst="4kb")
                        told(reader, read=nbytes, **where)
                        time.sleep(seconds / 2)
                        net.silence(True)
                        seen[nbytes] = told(reader, release=PATIENCE)
                        net.silence(False)
                        assert seen[nbytes]["settled"], seen
                        if 0 < seen[nbytes]["arrived"] < nbytes:
                            break
            finally:
                reader.kill()
    # Or nothing was tried.
    assert sum(0 < answer["arrived"] < nbytes for nbytes, answer in seen.items()) >= 2, seen
