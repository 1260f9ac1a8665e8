"""Markers, and what every test may rely on."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "slow: takes more than a few seconds (several processes, many samples)",
        "model: loads the real language model",
        "vllm: needs a vLLM CPU installation of its own environment",
        "cuda: needs an NVIDIA GPU",
        "xpu: needs an Intel GPU",
    ):
        config.addinivalue_line("markers", marker)
