"""Where payloads are staged: the host's memory or a device's own, by what both ends have and the transfer agent takes."""

from __future__ import annotations

import pytest

from backends.cpu.device import CpuReferenceDevice
from bridge.devices import DeviceWithMemory, engine_order
from bridge.handoff import Decoder, Prefiller, Target
from bridge.handoff.errors import StagingDiffers
from bridge.transfer.errors import RegistrationFailed
from tests.handoff.local_agent import LocalAgent
from tests.handoff.pair import MODEL, block_table, manifest, paged_cache, tokens_of
from tests.handoff.toy import Ends, ToyAgent, ToyDevice
from tests.waiting import PATIENCE


def hand_over(prefiller: Prefiller, decoder: Decoder) -> None:
    source, table = paged_cache(16, 4, seed=1), block_table(16, 4, 2)
    target, other = paged_cache(32, 2, seed=None), block_table(32, 2, 3)
    offer = prefiller.offer(manifest("r", 60), source, table)
    offer.advance(60)
    decoder.fetch(offer.ticket, Target(target, other, MODEL))
    offer.wait(PATIENCE)
    assert (tokens_of(target, other, 60) == tokens_of(source, table, 60)).all()


def test_a_device_stages_in_its_own_memory_where_the_agent_takes_it(ends: Ends) -> None:
    agent, device = ToyAgent(), ToyDevice()
    assert isinstance(device, DeviceWithMemory)
    prefiller = ends.prefiller(device, agent)
    decoder = ends.decoder(prefiller, device, agent)
    assert {(r.memory.device, r.memory.index) for r in agent.registered} == {("toy", 3)}
    hand_over(prefiller, decoder)
    assert {name.split("-")[1] for name in device.attached} == {"prefiller", "decoder", "land_0"} | (
        {"land_1"} if any("land_1" in name for name in device.attached) else set()
    )


def test_work_follows_what_the_calling_thread_has_queued(ends: Ends) -> None:
    agent, device = ToyAgent(), ToyDevice()
    prefiller = ends.prefiller(device, agent)
    hand_over(prefiller, ends.decoder(prefiller, device, agent))
    # One mark for advance, one for fetch; every chunk's pack and land follow theirs.
    assert len(device.marks) == 2
    assert device.afters == [device.marks[0]] * 2 + [device.marks[1]] * 2
    assert engine_order(CpuReferenceDevice()) == {}


def test_an_agent_for_host_memory_stages_there(ends: Ends) -> None:
    agent, device = LocalAgent(), ToyDevice()
    prefiller = ends.prefiller(device, agent)
    hand_over(prefiller, ends.decoder(prefiller, device, agent))
    assert {r.memory.device for r in agent.registered} == {"cpu"}


@pytest.mark.parametrize(("device", "agent"), [(ToyDevice(), LocalAgent()), (CpuReferenceDevice(), ToyAgent())])
def test_device_memory_that_cannot_be_is_refused(ends: Ends, device, agent) -> None:
    with pytest.raises(RegistrationFailed, match=r"does not take toy memory|has no memory of its own") as said:
        ends.prefiller(device, agent, staging="device")
    assert 'staging="host"' in said.value.advice
    assert not agent.registered


def test_a_decoder_adds_host_memory_for_a_prefiller_that_stages_there(ends: Ends) -> None:
    agent = ToyAgent()
    prefiller = ends.prefiller(CpuReferenceDevice(), agent)
    decoder = ends.decoder(prefiller, ToyDevice(), agent)
    assert decoder.staging() == (0, 1 << 20)
    hand_over(prefiller, decoder)
    assert decoder.staging() == (0, 2 << 20)
    decoder.close()
    assert {r.memory.device for r in agent.registered} == {"cpu"}  # the prefiller's


@pytest.mark.parametrize("options", [{}, {"staging": "host"}])
def test_a_decoder_without_the_prefillers_kind_of_memory_says_so(ends: Ends, options: dict) -> None:
    agent = ToyAgent()
    prefiller = ends.prefiller(ToyDevice(), agent)
    decoder = ends.decoder(prefiller, ToyDevice() if options else CpuReferenceDevice(), agent, **options)
    with pytest.raises(StagingDiffers, match="toy") as said:
        hand_over(prefiller, decoder)
    assert 'staging="host"' in said.value.advice
    assert decoder.counters.snapshot()["failed{staging_differs}"] == 1
