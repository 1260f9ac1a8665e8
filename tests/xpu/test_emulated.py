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


def test_example_hands_off_to_a_cpu() -> None:
    done = subprocess.run([sys.executable, "examples/xpu_to_cpu.py", "raw"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "xpu (emulated)" in done.stdout or "xpu (real)" in done.stdout
    sent, received = (line.split(":", 1)[1].strip() for line in done.stdout.splitlines() if line.startswith("sum of"))
    assert sent == received
