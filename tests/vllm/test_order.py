"""The order of vLLM's CPU caches inside a block, as described, against vLLM's own kernel; a description that is not it is refused."""

import json
import os
import subprocess

import pytest

from tests.vllm.engine import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def run(which: str) -> dict[str, str]:
    command = [vllm_python() or "", "-m", "tests.vllm.cpu_order", which]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def test_every_order_is_the_kernels():
    found = run("right")
    assert len(found) >= 24
    assert {case: said for case, said in found.items() if said} == {}


@pytest.mark.avx512
def test_fp8_caches_among_them():
    found = run("right")
    assert sum("fp8" in case for case in found) == 4
    assert {case: said for case, said in found.items() if said} == {}


def test_another_order_is_refused():
    found = run("wrong")
    assert len(found) >= 24
    for case, said in found.items():
        assert "keeps a cache" in said, case
        assert "order that is not the one known here" in said
        assert "vLLM 0.32" in said


def test_what_the_kernel_does_not_write_is_refused():
    found = run("refused")
    assert len(found) == 4
    for case, said in found.items():
        assert "does not write a cache of type fp8_e4m3 in blocks of " in said, case
        assert "a multiple of 32" in said
