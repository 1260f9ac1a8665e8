"""Agent.transports: what really carries the bytes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.transfer.serving import ROOT

PROGRAM = """
import sys
from tests.transfer import agents
from tests.transfer.serving import Serving, memory_of, poisoned, read_all
kind = sys.argv[1]
agent = agents.make(kind, "decoder", serves=False, files=agents.identities())
print(agent.transports())
with Serving(4096, kind=kind) as serving:
    read_all(agent.connect(serving.metadata), serving.memory, agent.register(memory_of(poisoned(4096))), 4096)
    print(agent.transports())
agent.close()
"""
SAYS = {
    "nixl": ("UCX_TLS=tcp from the configuration; nothing was read yet", r".*reads go by .*tcp/.*"),
    "ucx": ("UCX_TLS=tcp from the configuration; nothing is connected", r".*reads go by prefiller: tcp/\w+"),
    "stream": ("TLS 1.3 over TCP; nothing was connected yet", r"TLSv1\.3 TLS_\w+ over TCP; connected to prefiller at 127\.0\.0\.1:\d+"),
}


def test_says_so_and_prints_nothing(kind):
    """A fresh process, because UCX opens its log once a process; none of the libraries writes to the standard output."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, kind], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr[-2000:]
    before, after = run.stdout.splitlines()
    assert before == SAYS[kind][0]
    assert re.fullmatch(SAYS[kind][1], after)


@pytest.mark.parametrize("kind", ["nixl", "ucx"])
def test_the_environment_wins(kind):
    command = f"import os; os.environ['UCX_TLS'] = 'tcp'; import sys; sys.argv[1:] = ['{kind}']\n" + PROGRAM.replace(
        "identities())", "identities(), transports=['sysv', 'cma'])"
    )
    run = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.splitlines()[1].startswith("UCX_TLS=tcp from the environment, which overrides the configuration; reads go by ")
