"""The wall clock jumps, for Python, OpenSSL and everything else in the process, while a hand-off is under way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DAY = 86_400


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = tmp_path_factory.mktemp("shim") / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def crossing(shim, tmp_path, jump):
    clock = tmp_path / "offset"
    clock.write_text("0")
    environment = {**os.environ, "LD_PRELOAD": str(shim), "WALL_CLOCK_OFFSET": str(clock)}
    command = [sys.executable, "-m", "tests.faults.jumping", str(jump)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


@pytest.mark.parametrize("jump", [-DAY // 2, 365 * DAY])
def test_a_jump_in_mid_transfer_changes_nothing(shim, tmp_path, jump):
    answer = crossing(shim, tmp_path, jump)
    assert abs(answer["moved"] - jump) < 60, "the clock did jump"
    assert 0.7 < answer["passed"] < 60
    assert answer["same"]
    assert answer["later"] == "right"
    assert answer["failed"] == []


def test_before_the_certificates_begin_new_connections_are_refused_by_name(shim, tmp_path):
    answer = crossing(shim, tmp_path, -3 * DAY)
    assert answer["same"], "what was connected goes on"
    assert answer["later"] == "cannot_connect"
    assert answer["failed"] == ["failed{cannot_connect}"]
