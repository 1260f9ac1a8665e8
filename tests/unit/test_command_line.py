"""The command where its output cannot go: one sentence, and a status that says so."""

import json
import os
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE

COMMAND = [sys.executable, "-m", "bridge"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "nothing.kvb"], []])
def test_a_closed_standard_output_is_no_traceback(tmp_path, arguments):
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments]
    done = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("standard_output", [">/dev/full", ">&-"])
@pytest.mark.parametrize("arguments", [["--version"], ["inspect", "nothing.kvb"]], ids=" ".join)
def test_the_status_says_so_where_nothing_else_can(tmp_path, arguments, standard_output):
    command = ["/bin/sh", "-c", f'exec "$@" {standard_output} 2>/dev/full', "sh", *COMMAND, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, timeout=PATIENCE)
    assert done.returncode == 2


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_reader_that_went_away_is_no_traceback(unbuffered):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "", **unbuffered}
    process = subprocess.Popen([*COMMAND, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) == 2


def test_identity_makes_nothing_that_it_cannot_tell_of(tmp_path):
    command = ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "identity", "x", "--out", str(tmp_path / "made")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 2
    assert not (tmp_path / "made").exists()


@pytest.mark.slow
@pytest.mark.ucxx
def test_the_doctors_json_is_json_where_ucx_complains():
    """UCX writes its log to standard output unless told otherwise."""
    environment = {**os.environ, "UCX_TLS": "self", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*COMMAND, "doctor", "--json"], capture_output=True, text=True, env=environment, timeout=120)
    report = json.loads(done.stdout)
    assert {"agents", "devices"} <= set(report)
    assert "UCX" in done.stderr
