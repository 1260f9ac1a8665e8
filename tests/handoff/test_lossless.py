"""A decoder that keeps only what no lossy codec has changed."""

import pytest
import torch

from bridge.codecs import CODECS
from bridge.handoff.errors import LossyPayload, Refused
from bridge.pages import LayerPages, PagedCache
from tests.handoff.pair import block_table, manifest, paged_cache, tokens_of
from tests.waiting import PATIENCE

TOKENS = 100


@pytest.mark.parametrize("codec", CODECS)
def test_only_raw_is_taken(pair, codec):
    source, table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    target, target_table = paged_cache(64, 4, seed=None), block_table(64, 4, 3)
    offer = pair.prefiller.offer(manifest("r", TOKENS, codec), source, table)
    offer.advance(TOKENS)
    fetch = pair.decoder.start(offer.ticket, pair.target(target, target_table, lossless=True))
    if codec == "raw":
        fetch.result(PATIENCE)
        assert (tokens_of(source, table, TOKENS) == tokens_of(target, target_table, TOKENS)).all()
    else:
        with pytest.raises(LossyPayload, match=f"layer 0 travels as {codec}, which is lossy"):
            fetch.result(PATIENCE)
        assert all(torch.isnan(layer.key).all() for layer in target.layers.values())
        with pytest.raises(Refused):
            offer.wait(PATIENCE)
        assert pair.prefiller.counters.snapshot()["failed{lossy_payload}"] == 1
    assert pair.decoder.staging()[0] == 0


def test_what_pages_keep_themselves_is_no_loss(pair):
    """fp8 pages hold fp8 whether it was computed here or comes from elsewhere."""
    source, table = paged_cache(16, 12, seed=1), block_table(16, 12, 2)
    shape = (4, 64, 2, 64)
    target = PagedCache({i: LayerPages.nhd(*(torch.zeros(shape, dtype=torch.float8_e4m3fn) for _ in "kv")) for i in range(3)})
    offer = pair.prefiller.offer(manifest("r", TOKENS, "fp8_e4m3"), source, table)
    offer.advance(TOKENS)
    assert pair.decoder.start(offer.ticket, pair.target(target, block_table(64, 4, 3), lossless=True)).result(PATIENCE).nbytes > 0
