"""The demonstration as a user runs it: two processes, a real model, real NIXL."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.wire import read_container
from bridge.wire.container import verify_container

ROOT = Path(__file__).parents[2]


def kvbridge(*arguments, timeout=280):
    return subprocess.run([sys.executable, "-m", "bridge", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.mark.slow
@pytest.mark.model
def test_tokens_are_equal_and_payloads_are_kept(tmp_path):
    done = kvbridge("demo", "--codec", "raw", "--codec", "turboquant_4bit_nc", "--tokens", "8", "--json", "--keep", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"]
    assert result["left_over"] == 0
    assert result["processes"][0] != result["processes"][1]
    assert result["block_sizes"][0] != result["block_sizes"][1]
    raw, four = result["rows"]
    assert raw["tokens"] == raw["unquantised"]
    assert four["tokens"] == four["expected"]
    assert 0.25 < four["nbytes"] / four["bf16_bytes"] < 0.30
    assert "reads go by" in result["transports"]
    assert re.search(r"\[ *\d+\.\d s\] .*hand-off", done.stderr), "progress is visible"
    for row in result["rows"]:
        manifest = verify_container(tmp_path / f"{row['codec']}.kvb")
        assert len(read_container(tmp_path / f"{row['codec']}.kvb")[2]) == row["nbytes"]
        assert len(manifest.layers) == 30


@pytest.mark.slow
@pytest.mark.model
def test_chunks_can_stream():
    done = kvbridge("demo", "--codec", "fp8_e4m3", "--tokens", "4", "--mode", "stream", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--codec", "turboquant_4bit"], "did you mean turboquant_4bit_nc"),
        (["demo", "--tokens", "0"], "between 1 and"),
        (["demo", "--tokens", "many"], "--tokens"),
        (["demo", "--colour"], "--colour"),
        (["demo", "--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["inspect", "/nowhere/file.kvb"], "/nowhere/file.kvb"),
        (["identity", "a b"], "a b"),
        (["nothing"], "nothing"),
        ([], "COMMAND"),
    ],
)
def test_wrong_use_is_one_sentence_and_exit_code_2(arguments, words):
    done = kvbridge(*arguments, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.model
def test_a_busy_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        done = kvbridge("demo", "--codec", "raw", "--tokens", "1", "--port", str(busy.getsockname()[1]))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"control port 127.0.0.1:{busy.getsockname()[1]} cannot be opened" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_example_runs():
    done = subprocess.run([sys.executable, "examples/cpu_to_cpu.py", "raw"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split(": ")[1].strip() == lines[2].split(": ")[1].strip(), "raw arrives bit for bit"
