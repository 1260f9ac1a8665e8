"""An engine that holds its pages may wait for a decoder before it uses staging."""

import threading

import pytest

from bridge.handoff import Mode
from bridge.handoff.errors import Cancelled, HandoffError, LeaseExpired
from tests.handoff.pair import TOKENS, block_table, manifest, paged_cache
from tests.waiting import PATIENCE


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
    assert fetch.result(PATIENCE).nbytes == offer.payload_bytes
    holding.join(PATIENCE)
    assert order == ["claimed"]


@pytest.mark.parametrize("end", ["cancelled", "run out"])
def test_raises_what_ends_the_lease_first(pair, end):
    offer, raised = offered(pair), []

    def hold():
        try:
            offer.wait_claimed()
        except HandoffError as error:
            raised.append(type(error))

    holding = threading.Thread(target=hold)
    holding.start()
    holding.join(0.3)
    assert holding.is_alive(), "it waits as long as the lease lives"
    if end == "cancelled":
        offer.cancel()
    else:
        with pair.prefiller._leases.lock:
            offer._lease.deadline = 0
    holding.join(PATIENCE)
    assert raised == [Cancelled if end == "cancelled" else LeaseExpired]
