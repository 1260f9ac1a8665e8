from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm.rig import Rig


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.split(":", 1)[1].split()}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects, and says so, what this processor cannot run: vLLM's CPU attention keeps fp8 caches only with AVX-512 or AMX."""
    if {"avx512f", "amx_tile"} & _cpu_flags():
        return
    out = [item for item in items if item.get_closest_marker("avx512")]
    if out:
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)
        print(f"\n{len(out)} tests deselected: vLLM keeps fp8 caches on CPUs with AVX-512 or AMX only, and this one has neither")


@pytest.fixture(scope="session")
def rig(request):
    made = Rig()
    yield made
    made.close(keep=request.session.testsfailed > 0)
    if os.environ.get("KVBRIDGE_VLLM_TIMES"):
        for what, seconds in made.boots:
            print(f"\nboot {seconds:6.1f} s  {what}")
