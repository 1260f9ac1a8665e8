"""Settings of an engine that the connector refuses at its start, with vLLM's own classes but no engine; and what its log line counts."""

import json
import os
import subprocess

import pytest

from tests.vllm.engine import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def said():
    command = [vllm_python() or "", "-m", "tests.vllm.start_checks"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_engines_that_would_share_a_name_and_a_port_are_refused(said):
    assert said["alone"] == said["data, each engine by itself"] == ""
    assert "2 data-parallel engines would share one name" in said["data"]
    assert "start each engine by itself" in said["data"]
    assert "pipeline parallelism of 2" in said["pipeline"]


def test_the_log_line_has_no_differences_of_gauges(said):
    assert said["log line"] == {"prefiller_offered": 1}


def test_token_ids_that_no_tokenizer_gives_end_no_scheduler(said):
    """HTTP refuses them, a program that calls the engine may not."""
    assert said["fetch"] == [3, "", False]
    count, error, _ = said["fetch of no tokens"]
    assert count == 3
    assert "token" in error
    assert said["prefill"] == [0, "", True]
    assert said["prefill of no tokens"] == [0, "", False]
