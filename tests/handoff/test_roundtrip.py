"""A payload crosses: both modes, synchronous and asyncio, block sizes that differ."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from bridge.codecs import CODECS
from bridge.handoff import Mode
from tests.handoff.pair import block_table, manifest, paged_cache, tokens_of
from tests.waiting import PATIENCE

TOKENS = 150


def ends():
    return (paged_cache(16, 12, seed=1), block_table(16, 12, 2)), (paged_cache(64, 4, seed=None), block_table(64, 4, 3))


@pytest.mark.parametrize("mode", list(Mode))
def test_raw_arrives_bit_for_bit(pair, mode):
    (source, source_table), (target, target_table) = ends()
    offer = pair.prefiller.offer(manifest("r", TOKENS), source, source_table, mode=mode)
    fetch = pair.decoder.start(offer.ticket, pair.target(target, target_table))
    for computed in (10, 64, 149, TOKENS):
        offer.advance(computed)
    received = fetch.result(PATIENCE)
    offer.wait(PATIENCE)
    assert received.nbytes == offer.payload_bytes
    assert np.array_equal(tokens_of(source, source_table, TOKENS), tokens_of(target, target_table, TOKENS))
    written = sum((~torch.isnan(layer.key)).sum().item() for layer in target.layers.values())
    assert written == TOKENS * 2 * 64 * 3
    assert pair.prefiller.staging()[0] == pair.decoder.staging()[0] == 0
    assert pair.prefiller.live_leases() == 0


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_lands(pair, codec):
    (source, source_table), (target, target_table) = ends()
    offer = pair.prefiller.offer(manifest("r", TOKENS, codec), source, source_table)
    offer.advance(TOKENS)
    assert offer.packed
    pair.decoder.fetch(offer.ticket, pair.target(target, target_table))
    for index in source.layers:
        for name in ("key", "value"):
            pages = [
                getattr(cache.layers[index], name)[table.locate(0, TOKENS, 12 if cache is source else 4)].float()
                for cache, table in ((source, source_table), (target, target_table))
            ]
            assert ((pages[0] - pages[1]) ** 2).sum() / (pages[0] ** 2).sum() < 0.05


def test_asyncio(pair):
    (source, source_table), (target, target_table) = ends()

    async def hand_off():
        offer = pair.prefiller.offer(manifest("r", TOKENS), source, source_table, mode=Mode.STREAM)
        packing = asyncio.create_task(offer.advance_async(TOKENS))
        await pair.decoder.fetch_async(offer.ticket, pair.target(target, target_table))
        await packing
        await offer.wait_async(PATIENCE)

    asyncio.run(hand_off())
    assert np.array_equal(tokens_of(source, source_table, TOKENS), tokens_of(target, target_table, TOKENS))


def test_tokens_that_the_decoder_has_are_not_written_nor_their_chunks_read(pair):
    (source, source_table), (target, target_table) = ends()
    offer = pair.prefiller.offer(manifest("r", TOKENS), source, source_table)
    offer.advance(TOKENS)
    received = pair.decoder.fetch(offer.ticket, pair.target(target, target_table, first_token=70))
    page, position = target_table.locate(0, TOKENS, 4)
    for layer in target.layers.values():
        assert torch.isnan(layer.key[page, position][:70]).all()
        assert not torch.isnan(layer.key[page, position][70:]).any()
    assert received.nbytes < offer.payload_bytes
    offer.wait(PATIENCE)


def test_many_at_once(pair):
    (source, source_table), _ = ends()
    targets = [(paged_cache(64, 4, seed=None), block_table(64, 4, 10 + i)) for i in range(8)]
    offers = [pair.prefiller.offer(manifest(f"r{i}", TOKENS), source, source_table, mode=list(Mode)[i % 2]) for i in range(8)]
    threads = [threading.Thread(target=offer.advance, args=(TOKENS,)) for offer in offers]
    for thread in threads:
        thread.start()
    fetches = [pair.decoder.start(o.ticket, pair.target(*t)) for o, t in zip(offers, targets, strict=True)]
    for fetch, (target, table) in zip(fetches, targets, strict=True):
        fetch.result(PATIENCE)
        assert np.array_equal(tokens_of(source, source_table, TOKENS), tokens_of(target, table, TOKENS))
    for thread in threads:
        thread.join(PATIENCE)
    assert pair.prefiller.counters.snapshot()["committed"] == 8
    assert pair.decoder.counters.snapshot()["committed"] == 8
