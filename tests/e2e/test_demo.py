"""The demonstration as a user runs it: two processes, a real model, real NIXL."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bridge.wire import read_container
from bridge.wire.container import verify_container
from tests.signals import heard
from tests.waiting import PATIENCE, eventually

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
        (["demo", "--colour"], "kvbridge demo --help"),
        (["demo", "--port", "99999"], "no port between"),
        (["demo", "--port", "-1"], "--port"),
        (["demo", "--device", "cpuu"], "cpu-reference"),
        (["inspect", "/dev/null"], "no regular file"),
        (["identity", "name", "--out", "/dev/null"], "/dev/null: not a folder; correct the path"),
        (["demo", "--keep", "/dev/null"], "/dev/null: not a folder; correct the path"),
        (["demo", "--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["inspect", "/nowhere/file.kvb"], "/nowhere/file.kvb: no such file or directory; correct the path"),
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


@pytest.mark.parametrize(("content", "words"), [(b"\x9e\xff\x00", "not UTF-8"), (b" \n", "prompt is empty")])
def test_a_prompt_file_that_is_no_prompt(tmp_path, content, words):
    (tmp_path / "prompt").write_bytes(content)
    done = kvbridge("demo", "--prompt-file", str(tmp_path / "prompt"), timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["inspect", "tests/vectors/small.kvb"]])
def test_a_full_disk_is_a_sentence(arguments, unbuffered):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | unbuffered
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bridge", *arguments],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr == "kvbridge: standard output cannot be written: no space left on device\n"


def running_with(folder):
    """Processes whose temporary files are to be in this folder."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "moment"), [(signal.SIGINT, "as it starts"), (signal.SIGINT, "as it runs"), (signal.SIGTERM, "as it runs")], ids=str
)
def test_an_interrupt_ends_both_processes_quietly(tmp_path, number, moment):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "demo"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
        preexec_fn=heard,
    )
    while "starting the decoder process" not in process.stderr.readline():
        assert process.poll() is None
    if moment == "as it runs":
        assert eventually(lambda: len(running_with(tmp_path)) == 2)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "kvbridge: interrupted"
    assert not list(tmp_path.glob("kvbridge-demo-*")), "private keys are gone"
    assert eventually(lambda: not running_with(tmp_path)), "nor is the second process there"


@pytest.mark.slow
def test_a_busy_port_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = kvbridge("demo", "--codec", "raw", "--tokens", "1", "--port", str(port))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"control port 127.0.0.1:{port} cannot be opened" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_example_runs():
    done = subprocess.run([sys.executable, "examples/cpu_to_cpu.py", "raw"], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].split(": ")[1].strip() == lines[2].split(": ")[1].strip(), "raw arrives bit for bit"


@pytest.mark.slow
def test_what_the_readme_shows_runs(tmp_path):
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "bytes verified and landed" in done.stdout
