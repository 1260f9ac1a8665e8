import pytest

from tests.handoff.pair import Pair


@pytest.fixture
def pair(tmp_path):
    """Both ends; after the test nothing may be left of them."""
    made = Pair(tmp_path)
    yield made
    made.close()
    assert made.agent.registered_bytes() == 0
