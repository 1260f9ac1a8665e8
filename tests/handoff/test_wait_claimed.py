"""An engine that holds its pages may wait for a decoder before it uses staging."""

import threading

import pytest

from bridge.handoff import Mode
from bridge.handoff.errors import Cancelled, LeaseExpired
from tests.handoff.pair import block_table, manifest, paged_cache

TOKENS = 150


def offered(pair):
    return pair.prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2), mode=Mode.STREAM)


def test_returns_when_a_decoder_has_claimed(pair):
    offer, order = offered(pair), []

    def hold():
        offer.wait_claimed()
        order.append("claimed")
        offer.advance(TOKENS)

    holding = threading.Thread(target=hold)
    holding.start()
    holding.join(0.3)
    assert order == []
    assert pair.prefiller.staging()[0] == 0
    fetch = pair.decoder.start(offer.ticket, pair.target(paged_cache(64, 4, seed=None), block_table(64, 4, 3)))
    assert fetch.result(10).nbytes == offer.payload_bytes
    holding.join(5)
    assert order == ["claimed"]


@pytest.mark.slow
def test_raises_what_ends_the_lease_first(pair):
    offer = offered(pair)
    threading.Timer(0.2, offer.cancel).start()
    with pytest.raises(Cancelled):
        offer.wait_claimed()
    with pytest.raises(LeaseExpired):
        offered(pair).wait_claimed()
