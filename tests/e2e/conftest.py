"""The marker of tests that load the real language model, so that quick runs may leave them out with `-m "not model"`."""

import pytest

from bridge.demo.model import load_model


def pytest_configure(config):
    config.addinivalue_line("markers", "model: loads the real language model (20 s the first time on a machine, then a few seconds)")


@pytest.fixture(scope="session")
def model():
    # One thread: the same sums however many cores there are, and no waiting for a busy one.
    return load_model(threads=1)
