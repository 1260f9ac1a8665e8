"""The emulated XPU beyond conformance: death of its process, bytes it must not touch, the offline compiler's report, the examples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.xpu import emulated
from backends.xpu.emulated import EmulatedXpu, WorkerDied
from backends.xpu.environment import need_environment
from tests.conformance.cases import Case, chunks, source, target
from tests.conformance.test_roundtrip import round_trip
from tests.xpu import identity

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xpu_emulated, pytest.mark.slow]


@pytest.fixture(scope="module")
def device() -> Iterator[EmulatedXpu]:
    made = EmulatedXpu()
    yield made
    made.close()


def test_it_says_that_it_is_no_hardware(device: EmulatedXpu) -> None:
    said = device.probe()
    assert said.startswith("an emulated XPU, no hardware")
    assert "Intel" in said


def test_the_process_may_die_and_the_next_call_starts_another(device: EmulatedXpu) -> None:
    case = Case("raw", first=0, end=32, layers=(1,), heads=1)
    round_trip(device, case)
    os.kill(device._worker.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    mine = source(case)
    (share,) = chunks(case.manifest(), mine.cache)
    out = np.full(share.nbytes, 0xCD, np.uint8)
    with pytest.raises(WorkerDied):
        device.pack(mine.cache, mine.table, share.shares, case.keys(), out)
    assert (out == 0xCD).all()
    round_trip(device, case)


def test_a_process_that_does_not_answer_is_ended(device: EmulatedXpu, monkeypatch: pytest.MonkeyPatch) -> None:
    device.probe()
    worker = device._worker
    os.kill(worker.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    worker.link.settimeout(0.5)  # type: ignore[union-attr]
    with pytest.raises(WorkerDied, match="did not answer"):
        device.probe()
    assert worker.process.poll() is not None  # type: ignore[union-attr]
    assert "no hardware" in device.probe()


def test_what_the_engine_writes_meanwhile_stays(device: EmulatedXpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only bytes that landing changed are copied back."""
    case = Case("raw", first=0, end=32, layers=(1,), heads=1)
    mine, landed = source(case), target(case)
    (share,) = chunks(case.manifest(), mine.cache)
    data = np.full(share.nbytes, 0xCD, np.uint8)
    device.pack(mine.cache, mine.table, share.shares, case.keys(), data)
    ask = emulated._Worker.ask
    page = landed.cache.layers[1].key[0 if landed.table.pages[0] else 1]

    def ask_while_the_engine_writes(worker, message):
        answer = ask(worker, message)
        page[...] = 3.0
        return answer

    monkeypatch.setattr(emulated._Worker, "ask", ask_while_the_engine_writes)
    device.land(landed.cache, landed.table, share.shares, case.keys(), data, 0, 32)
    assert torch.equal(page, torch.full_like(page, 3.0))


def test_digests_of_packed_vectors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert identity.main(["digests", "xpu-emulated", "--vectors", "2000"]) == 0
    assert capsys.readouterr().out.count("identical") == len(identity.CODECS)


def test_a_file_that_it_packed_lands_by_the_reference(tmp_path: Path) -> None:
    assert identity.pack_files("xpu-emulated", tmp_path / "small", tokens=40) == 0
    files = sorted(tmp_path.glob("*.kvb"))
    assert len(files) == len(identity.CODECS)
    for file in files:
        assert identity.land_file("cpu", file) == 0


def test_roots_and_reciprocals_are_correctly_rounded(tmp_path: Path) -> None:
    """A thousandth of what `roots.py` takes in full."""
    settings = {"CL_CONFIG_CPU_O0_VECTORIZATION": "1", "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [need_environment().python, "-P", "tests/xpu/roots.py", tmp_path, "1024"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTHON"))}
    done = subprocess.run(command, cwd=ROOT, env={**inherited, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("32768 numbers") == done.stdout.count("0 roots and 0 reciprocals wrong") == 7


def test_a_sample_of_the_native_report_is_green(tmp_path: Path) -> None:
    if need_environment().ocloc() is None:
        pytest.fail("Intel's offline compiler is not in the environment; make xpu-env takes it from Debian's packages")
    found = tmp_path / "report.json"
    command = [sys.executable, "-m", "backends.xpu.native", "--count", "12", "--seed", "5", "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(found.read_text())
    assert len(results) == 12
    assert all(result["instructions"] > 100 and result["spills"] == 0 for result in results)


@pytest.mark.parametrize("example", ["xpu_to_cpu.py", "xpu_to_xpu.py"])
def test_examples_hand_off(example: str) -> None:
    done = subprocess.run([sys.executable, f"examples/{example}", "raw"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = done.stdout.splitlines()[:2]
    kinds = ["emulated" if "xpu (emulated): an emulated XPU, no hardware" in end else "real" for end in ends]
    assert kinds == (["emulated", "real"] if example == "xpu_to_cpu.py" else ["emulated", "emulated"])
    sent, received = (line.split(":", 1)[1].strip() for line in done.stdout.splitlines() if line.startswith("sum of"))
    assert sent == received


def test_an_example_whose_other_end_is_missing_says_so_in_one_sentence() -> None:
    settings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "examples/xpu_to_cuda.py", "raw"], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "CUDA" in done.stderr or "NVIDIA" in done.stderr


@pytest.mark.model
@pytest.mark.timeout(600)
def test_demonstration_with_an_emulated_prefiller() -> None:
    """A real model's cache, packed here, over NIXL to a CPU in a second process, which decodes from it."""
    arguments = ["--prefiller", "xpu-emulated", "--codec", "turboquant_4bit_nc", "--tokens", "8", "--json"]
    done = subprocess.run([sys.executable, "-m", "bridge", "demo", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"]
    assert result["device"].startswith("xpu-emulated (an emulated XPU, no hardware")
    assert result["device"].endswith("every share so far went through a kernel), decoder: cpu")
    (row,) = result["rows"]
    assert row["tokens"] == row["expected"]
    assert len(row["tokens"]) == 8
