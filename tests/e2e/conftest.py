"""The real language model, loaded once; quick runs leave its tests out with `-m "not model"`."""

import pytest

from bridge.demo.model import load_model


@pytest.fixture(scope="session")
def model():
    # One thread: the same sums however many cores there are, and no waiting for a busy one.
    return load_model(threads=1)
