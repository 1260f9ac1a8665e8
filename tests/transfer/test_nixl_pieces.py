"""Thousands of ranges are cut into pieces of bounded size."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np

from bridge.transfer.agent import Memory, RemoteMemory
from bridge.transfer.nixl.reads import Reads
from bridge.transfer.ranges import RANGES_PER_PIECE, pieces_of


def test_pieces_cover_every_byte_once():
    random = np.random.default_rng(0)
    sizes = np.concatenate([random.integers(1, 50_000, 5000), [1_000_001, 8192, 8193]])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    pieces = pieces_of(np.stack([starts, starts, sizes], axis=1), 8192)
    assert max(len(p) for p in pieces) <= RANGES_PER_PIECE
    assert max(int(p[:, 2].sum()) for p in pieces) <= 8192
    rows = np.concatenate(pieces)
    assert (rows[1:, 0] == (rows[:, 0] + rows[:, 2])[:-1]).all()
    assert rows[0, 0] == 0
    assert rows[:, 2].sum() == sizes.sum()


class Native:
    """A native agent whose reads are under way until the test says otherwise; `looks` is called in the middle of posting one."""

    def __init__(self) -> None:
        self.looks = lambda: None
        self.state = "PROC"

    def get_xfer_descs(self, rows, segment):
        return rows

    def initialize_xfer(self, *arguments):
        return object()

    def transfer(self, handle):
        self.looks()
        return self.state

    def check_xfer_state(self, handle):
        return self.state

    def release_xfer_handle(self, handle) -> None:
        return


def test_a_read_is_not_done_while_its_last_piece_is_posted():
    """`done` is asked without the lock, while another thread posts."""
    native, seen = Native(), []
    errors = SimpleNamespace(nixlNotFoundError=KeyError)
    reads = Reads(native, errors, threading.RLock(), 4096, lambda name: None, lambda name: None)
    native.looks = lambda: seen.append(reads._active[0].settled)
    peer = SimpleNamespace(name="peer", _native="peer", _closed=False)
    target = SimpleNamespace(memory=Memory(0, 1 << 20, "cpu", 0), released=False)
    transfer = reads.start(peer, RemoteMemory(0, 1 << 20, "cpu", 0), target, np.array([[0, 0, 8192]]))
    native.state = "DONE"
    reads.advance(transfer)
    assert len(seen) >= 2
    assert not any(seen)
    assert transfer.settled
