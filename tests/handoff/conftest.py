from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.pages import BlockTable, PagedCache
from tests.handoff.pair import Pair, block_table, paged_cache
from tests.handoff.toy import Ends


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Both ends; after the test nothing may be left of them."""
    made = Pair(tmp_path)
    yield made
    made.close()
    assert made.agent.registered_bytes() == 0


@pytest.fixture
def source() -> tuple[PagedCache, BlockTable]:
    """The prefiller's pages."""
    return paged_cache(16, 12, seed=1), block_table(16, 12, 2)


@pytest.fixture
def target() -> tuple[PagedCache, BlockTable]:
    """The decoder's pages, NaN."""
    return paged_cache(64, 4, seed=None), block_table(64, 4, 3)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Makers of ends; what they have made is closed after the test."""
    made = Ends(tmp_path)
    yield made
    for end in reversed(made.open):
        end.close()
