"""Markers. A test whose hardware is absent is deselected and counted as such: never skipped, never passed."""

from __future__ import annotations

import importlib.util

import pytest

MARKERS = {
    "slow": "takes more than a few seconds: several processes, many samples",
    "model": "loads the real language model",
    "cuda": "needs an NVIDIA GPU",
    "xpu": "needs an Intel GPU",
    "xpu_emulated": "needs the environment of the emulated XPU (make xpu-env)",
    "vllm": "starts vLLM engines; needs an environment with vLLM (make vllm-env)",
    "boots": "starts engines of further configurations: 20 seconds to two minutes each",
    "netns": "needs network namespaces: root, ip and tc",
    "ucxx": "of the ucx agent alone; needs ucxx",
    "avx512": "needs a processor with AVX-512 or AMX",
}

NEEDS = ("cuda", "xpu", "xpu_emulated", "vllm", "netns", "ucxx")
"""Those that a machine may lack; tests/vllm looks for AVX-512 itself, in the processor that its engines run on."""


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def _absent() -> set[str]:
    """Markers of hardware, or of an environment, that this machine does not have."""
    import torch

    from backends.xpu.environment import find_environment
    from benchmarks.links import why_not
    from tests.vllm.engine import vllm_python

    present = {
        "cuda": torch.cuda.is_available(),
        "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(),
        "xpu_emulated": find_environment() is not None,
        "vllm": vllm_python() is not None,
        "netns": why_not() is None,
        "ucxx": importlib.util.find_spec("ucxx") is not None,
    }
    return {name for name, there in present.items() if not there}


@pytest.hookimpl(trylast=True)  # after -m, so that what is said is of what was asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    hardware = {name for name in NEEDS for item in items if item.get_closest_marker(name)}
    absent = hardware and _absent() & hardware
    if absent:
        out = [item for item in items if any(item.get_closest_marker(name) for name in absent)]
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=out)
        for name in sorted(absent):
            count = sum(item.get_closest_marker(name) is not None for item in out)
            print(f"\n{count} tests deselected, {name} is absent here: {MARKERS[name]}", end="")
        print()
