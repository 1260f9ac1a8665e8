"""Which transports are in force, and which UCX really uses for reads."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.transfer.nixl_serving import MIB, ROOT, TCP, Serving, memory_of, poisoned, read_all

PROGRAM = """
import sys
from bridge.transfer.nixl import NixlAgent
from tests.transfer.nixl_serving import MIB, Serving, memory_of, poisoned, read_all
listed = sys.argv[1].split(",") if sys.argv[1] else None
agent = NixlAgent("decoder", transports=listed, serves=False)
print(agent.transports())
with Serving(MIB, transports=listed) as serving:
    read_all(agent.connect(serving.metadata), serving.memory, agent.register(memory_of(poisoned(MIB))), MIB)
print(agent.transports())
agent.close()
"""


def run(listed: str, **environment: str) -> list[str]:
    """A fresh process, because UCX opens its log once a process. Returns transports() before and after a read."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, listed], cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_configured():
    before, after = run("tcp")
    assert before == "UCX_TLS=tcp from the configuration; nothing was read yet"
    assert after.startswith("UCX_TLS=tcp from the configuration; reads go by ")
    assert "tcp/" in after
    assert "cma" not in after


def test_the_environment_wins_and_the_output_is_clean():
    """Also: neither library writes to the standard output."""
    lines = run("sysv,cma", UCX_TLS="tcp")
    assert len(lines) == 2
    assert lines[1].startswith("UCX_TLS=tcp from the environment, which overrides the configuration; reads go by ")
    assert "tcp/" in lines[1]


def test_a_log_that_the_operator_configured_is_left_alone(tmp_path):
    log = tmp_path / "ucx.log"
    lines = run("tcp", UCX_LOG_FILE=str(log), UCX_LOG_LEVEL="info")
    assert lines[1].endswith("which one is unknown, since UCX's log is configured elsewhere")
    assert log.exists()


def test_the_environment_is_restored(make_agent):
    before = dict(os.environ)
    agent = make_agent(transports=TCP)
    assert dict(os.environ) == before
    with Serving(MIB, transports=TCP) as serving:
        read_all(agent.connect(serving.metadata), serving.memory, agent.register(memory_of(poisoned(MIB))), MIB)
    assert "UCX_TLS=tcp" in agent.transports()
