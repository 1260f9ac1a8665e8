"""A .kvb file on a full disk: the writer is told, and what is left is no file that a reader accepts."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.shares import chunk_share
from bridge.wire import PayloadMap, TagKeys, new_key, read_container, write_container
from bridge.wire.container import verify_container
from bridge.wire.errors import WireError
from tests.handoff.pair import block_table, manifest, paged_cache

TOKENS = 150


@pytest.fixture
def payload():
    described, key = manifest("r", TOKENS), new_key()
    layout, cache, table = PayloadMap(described), paged_cache(16, 12, 1), block_table(16, 12, 2)
    data = np.zeros(layout.payload_bytes, np.uint8)
    for index in range(layout.chunk_count):
        chunk = layout.chunk(index)
        keys = TagKeys(key, described.lease, described.generation)
        out = data[chunk.offset : chunk.offset + chunk.nbytes]
        CpuReferenceDevice().pack(cache, table, chunk_share(described, chunk, cache).shares, keys, out)
    return described, key, data.data


def test_the_device_that_is_always_full(payload):
    if not Path("/dev/full").exists():
        pytest.fail("this system has no /dev/full: run the tests on Linux")
    with pytest.raises(OSError, match="space") as caught, open("/dev/full", "wb") as file:
        write_container(file, *payload)
    assert caught.value.errno == errno.ENOSPC


def test_a_file_that_may_not_grow_further_is_cut_short_and_refused(payload, tmp_path):
    """A limit on the size of files stands for the disk: the kernel writes what fits and refuses the rest."""
    import resource
    import signal

    path, before, ignored = tmp_path / "cut.kvb", resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    whole = tmp_path / "whole.kvb"
    with whole.open("wb") as file:
        write_container(file, *payload)
    assert verify_container(whole) == payload[0]
    room = whole.stat().st_size * 2 // 3
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        with pytest.raises(OSError, match="large") as caught, path.open("wb") as file:
            write_container(file, *payload)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert caught.value.errno == errno.EFBIG
    assert 0 < os.path.getsize(path) <= room
    with pytest.raises(WireError) as refused:
        read_container(path)
    assert refused.value.clause == "truncated"
