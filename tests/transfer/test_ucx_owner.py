"""The serving side of the ucx agent by itself, with a worker of which the test decides what completes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bridge.transfer.ranges import RANGE
from bridge.transfer.ucx import owner as ucx_owner
from bridge.transfer.ucx import wire
from bridge.transfer.ucx.owner import MAX_REQUESTS, MAX_SESSIONS, Owner

INSTANCE, ADDRESS = bytes(16), b"address"


class Worker:
    """Nothing completes before the test says so."""

    def __init__(self):
        self.pending, self.endpoints, self.refuses = [], [], False

    def connect(self, address):
        self.endpoints.append(SimpleNamespace(alive=True))
        return self.endpoints[-1]

    def disconnect(self, endpoint):
        if endpoint in self.endpoints:
            self.endpoints.remove(endpoint)

    def send(self, endpoint, pairs, done):
        if self.refuses:
            raise RuntimeError("endpoint error")
        self.pending.append(done)

    def say(self, endpoint, message, done=lambda status: None):
        self.send(endpoint, [], done)

    def complete(self):
        pending, self.pending = self.pending, []
        for done in pending:
            done(0)


class Region:
    def __init__(self):
        self.array, self.inside = np.zeros(4096, np.uint8), 0

    def enter(self):
        self.inside += 1
        return True

    def leave(self):
        self.inside -= 1


@pytest.fixture
def serving():
    worker, region = Worker(), Region()
    owner = Owner(lambda: worker, INSTANCE, lambda number: region if number == 1 else None, 1000.0)
    return owner, worker, region


def session(number):
    return number.to_bytes(16, "little")


def hello(owner, number):
    owner.handle(wire.Hello(session(number), wire.prove(INSTANCE, session(number), ADDRESS), ADDRESS))


def read(number, request, region=1):
    return wire.Read(session(number), request, region, np.array([(0, 8)], RANGE).tobytes())


def test_answers_that_a_reader_does_not_take_do_not_pile_up(serving):
    owner, worker, _ = serving
    hello(owner, 1)
    for request in range(10 * MAX_REQUESTS):
        if owner.sessions():
            owner.handle(read(1, request, region=2))
    assert not owner.sessions()
    assert not worker.endpoints
    assert len(worker.pending) <= 2 * MAX_REQUESTS + 2


def test_a_reader_that_takes_its_answers_may_be_refused_as_often_as_it_likes(serving):
    owner, worker, _ = serving
    hello(owner, 1)
    for request in range(10 * MAX_REQUESTS):
        owner.handle(read(1, request, region=2))
        worker.complete()
    assert owner.sessions() == 1
    assert owner.refused == 10 * MAX_REQUESTS


def test_readers_that_are_too_many_do_not_pile_up_either(serving, monkeypatch):
    owner, worker, _ = serving
    monkeypatch.setattr(ucx_owner, "MAX_SESSIONS", 4)
    for number in range(4 + MAX_REQUESTS):
        hello(owner, number)
    with pytest.raises(wire.BadMessage, match="more readers"):
        hello(owner, MAX_SESSIONS + MAX_REQUESTS)
    assert len(worker.endpoints) == 4 + MAX_REQUESTS
    worker.complete()
    assert len(worker.endpoints) == 4
    hello(owner, 1000)
    assert len(worker.endpoints) == 5


@pytest.mark.parametrize("message", [read(1, 7), read(1, 7, region=2)], ids=["a read", "a read that is refused"])
def test_what_the_bindings_raise_ends_that_readers_session_and_nothing_else(serving, message):
    owner, worker, region = serving
    hello(owner, 1)
    hello(owner, 2)
    worker.refuses = True
    with pytest.raises(wire.BadMessage, match="endpoint error"):
        owner.handle(message)
    assert owner.sessions() == 1
    assert region.inside == 0 or worker.pending
    worker.refuses = False
    owner.handle(read(2, 8))
    assert region.inside == 1
    worker.complete()
    assert region.inside == 0


def test_a_greeting_that_cannot_be_answered_leaves_no_session(serving):
    owner, worker, _ = serving
    worker.refuses = True
    with pytest.raises(wire.BadMessage, match="endpoint error"):
        hello(owner, 1)
    assert not owner.sessions()
    assert not worker.endpoints
