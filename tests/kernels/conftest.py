"""Kernels run on the GPU where there is one, else under Triton's interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter takes seconds a test."""
    for item in items:
        if "tests/kernels" in str(item.path):
            item.add_marker(pytest.mark.slow)
