"""A lease lives on by progress alone: a decoder that says the same again and again does not keep a prefiller's staging memory."""

import pytest

from bridge.handoff import messages
from bridge.handoff.errors import PeerLost
from bridge.handoff.messages import u64
from tests.handoff.pair import HEADS, MODEL, block_table, manifest, paged_cache

TOKENS = 150


class Told:
    """A session to which anything may be said."""

    peer = "decode-0"

    def grant(self, *said):
        pass

    refuse = revoke = grant


@pytest.fixture
def offer(pair):
    made = pair.prefiller.offer(manifest("r", TOKENS), paged_cache(16, 12, seed=1), block_table(16, 12, 2))
    made.advance(TOKENS)
    return made


@pytest.fixture
def session():
    return Told()


def test_what_was_said_before_is_no_progress(pair, offer, session):
    leases, ticket, lease = pair.prefiller._leases, offer.ticket, offer._lease
    leases.claimed(session, messages.Claim(1, "r", u64(ticket.lease), ticket.generation, 0, HEADS, MODEL))
    for chunk in range(2):
        lease.deadline = 0.0
        leases.taken(session, ticket.lease, ticket.generation, chunk)
        assert lease.deadline > 0, "a chunk that arrives is progress"
        lease.deadline = 0.0
        leases.taken(session, ticket.lease, ticket.generation, chunk)
        assert lease.deadline == 0.0
    leases.claimed(session, messages.Claim(2, "r", u64(ticket.lease), ticket.generation, 1, HEADS, MODEL))
    assert len(lease.sessions) == 2
    assert lease.deadline == 0.0, "nor is one reader after the other"
    leases.expire()
    assert not lease.live


@pytest.mark.parametrize("goes", ["is lost", "gives up what it has committed"])
def test_a_reader_that_has_committed_and_goes_ends_no_others_hand_off(pair, offer, goes):
    """A rank that was done first, and restarted or connected anew: the other rank's chunks were taken back in the middle."""
    leases, ticket, lease = pair.prefiller._leases, offer.ticket, offer._lease
    first, second = Told(), Told()
    first.released = second.released = lambda lease: None
    for reader, session in enumerate((first, second)):
        leases.claimed(session, messages.Claim(1, "r", u64(ticket.lease), ticket.generation, reader, 2, MODEL))
    chunks = range(lease.map.chunk_count)
    for chunk in chunks:
        leases.taken(first, ticket.lease, ticket.generation, chunk)
    leases.committed(first, ticket.lease, ticket.generation)
    if goes == "is lost":
        leases.drop(first, PeerLost("gone"))
    else:
        leases.abandoned(first, ticket.lease, ticket.generation, "cancelled", "late")
    assert lease.live
    assert len(lease.slots) == len(chunks)
    for chunk in chunks:
        leases.taken(second, ticket.lease, ticket.generation, chunk)
    leases.committed(second, ticket.lease, ticket.generation)
    offer.wait(timeout=5)


def test_a_reader_that_is_lost_before_it_has_committed_ends_the_hand_off(pair, offer):
    leases, ticket, lease = pair.prefiller._leases, offer.ticket, offer._lease
    first, second = Told(), Told()
    for reader, session in enumerate((first, second)):
        leases.claimed(session, messages.Claim(1, "r", u64(ticket.lease), ticket.generation, reader, 2, MODEL))
    leases.drop(first, PeerLost("gone"))
    assert not lease.live
