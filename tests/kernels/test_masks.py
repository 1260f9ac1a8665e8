"""Masks made by the kernel are the key stream that the host makes."""

import numpy as np
import pytest
import torch

from backends.accelerator.masks import RECORD, launch_masks
from bridge.wire import TagKeys, new_key
from tests.kernels.cases import DEVICE

POISON = 0x55AA55AA55AA55AA
LAST = (1 << 34) - 8
"""Ordinal of the last masks that there are, before the hash keys begin in the key stream."""


def made(keys: TagKeys, stretches: list[tuple[int, int]], gap: int) -> list[np.ndarray]:
    """What stands in a poisoned array after one launch, stretch by stretch; nothing outside them may have changed."""
    size = sum(count + gap for _, count in stretches)
    words = torch.full((size + 8 + RECORD * len(stretches),), POISON, dtype=torch.int64)
    words[size : size + 8] = torch.from_numpy(keys.state().copy()).view(torch.int64)
    places, at = [], 0
    for number, (first, count) in enumerate(stretches):
        start = size + 8 + RECORD * number
        words[start : start + RECORD] = torch.tensor([first, count, at])
        places.append(at)
        at += count + gap
    before, words = words.clone(), words.to(DEVICE)
    launch_masks(words, size, size + 8, len(stretches), max(count for _, count in stretches))
    after = words.cpu()
    found = []
    for place, (_, count) in zip(places, stretches, strict=True):
        found.append(after[place : place + count].numpy().view(np.uint64).copy())
        after[place : place + count] = POISON
    assert torch.equal(after, before)
    return found


@pytest.mark.parametrize("gap", [0, 3])
def test_masks_are_the_hosts(gap):
    keys = TagKeys(new_key(), 2**63 + 5, 2**31 + 7)
    rng = np.random.default_rng(3)
    stretches = [(0, 1), (7, 2), (8, 8), (3, 600), (LAST, 8), (LAST - 100, 99), (2**33 + 5, 513)]
    stretches += [(int(rng.integers(0, 1 << 30)), int(rng.integers(1, 700))) for _ in range(5)]
    for found, (first, count) in zip(made(keys, stretches, gap), stretches, strict=True):
        assert np.array_equal(found, keys.masks(first, count)), (first, count)


def test_another_lease_has_other_masks():
    key = new_key()
    (one,) = made(TagKeys(key, 1, 0), [(0, 64)], 0)
    (other,) = made(TagKeys(key, 2, 0), [(0, 64)], 0)
    assert not (one == other).any()


def test_the_state_is_that_of_the_rfc():
    """RFC 8439, section 2.3.2, whose nonce begins with 9 where ours has the lease."""
    key = bytes(range(32))
    nonce = bytes.fromhex("000000090000004a00000000")
    keys = TagKeys(key, int.from_bytes(nonce[:8], "little"), int.from_bytes(nonce[8:], "little"))
    state = keys.state()
    assert state[:4].tolist() == [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    assert state[12:].tolist() == [0, 0x09000000, 0x4A000000, 0]
    (block,) = made(keys, [(8, 8)], 0)  # the second block of the stream, counter 1
    assert block.tobytes()[:16] == bytes.fromhex("10f1e7e4d13b5915500fdd1fa32071c4")
