"""What a block table refuses, and that checking it is what locating every token would say."""

import numpy as np
import pytest

from bridge.pages import BlockTable, PagesDoNotFit


@pytest.mark.parametrize(("pages", "block_size"), [(([0, 1, 2],), 16), (7, 16), ([0, 1], 0), ([0, 1], -16)])
def test_what_is_no_list_of_pages_is_refused_when_it_is_made(pages, block_size):
    """One list a group, as vLLM keeps them, passed as a table of one page until something was written."""
    with pytest.raises(PagesDoNotFit, match="is one list of page ids"):
        BlockTable(pages, block_size)


def naive(table: BlockTable, first: int, end: int, num_pages: int) -> bool:
    """Whether every token of [first, end) has a page; the table reaches to `end` in any case."""
    if first < 0 or end > len(table.pages) * table.block_size:
        return False
    return all(0 <= table.pages[token // table.block_size] < num_pages for token in range(first, end))


def test_a_check_says_what_each_token_would():
    rng, seen = np.random.default_rng(5), {True: 0, False: 0}
    for _ in range(4000):
        table = BlockTable(rng.integers(-1, 6, rng.integers(0, 7)).tolist(), int(rng.integers(1, 20)))
        first, end, pages = int(rng.integers(-2, 60)), int(rng.integers(0, 100)), int(rng.integers(1, 7))
        fits = naive(table, first, end, pages)
        seen[fits] += 1
        for asked in (table.check, table.locate):
            if fits:
                asked(first, end, pages)
            else:
                with pytest.raises(PagesDoNotFit):
                    asked(first, end, pages)
    assert min(seen.values()) > 200
