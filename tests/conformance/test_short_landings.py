"""A landing says beforehand whether it is short: only such a one is called on a decoder's event loop, which others wait for."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import pytest

from backends.accelerator.device import Accelerator, Planned
from tests.conformance.cases import Case, Memory, chunks, compare_memory, place_of, reference_land, reference_pack, source, target

CASE = Case(heads=1, first=0, end=16, layers=(0,))


class Landing:
    """One chunk, what it is to become, and where."""

    def __init__(self, device: Accelerator, case: Case) -> None:
        self.device, self.case, self.keys = device, case, case.keys()
        held = source(case)
        (self.share,) = chunks(case.manifest(), held.cache)
        self.data = reference_pack(held, self.share, self.keys)
        self.expected = target(case)
        reference_land(self.expected, self.share, self.keys, self.data, 0, case.end)

    def planned(self, after: object = None) -> tuple[Planned, Memory]:
        memory = target(self.case, place_of(self.device))
        plan = self.device.landing(
            memory.cache, memory.table, self.share.shares, self.keys, self.share.nbytes, "cpu", 0, self.case.end, after=after
        )
        self.device.mark().synchronize()  # what this thread has queued, such as the pages' poison
        return plan, memory

    def lands(self, plan: Planned, memory: Memory) -> None:
        plan(self.data.copy())
        compare_memory(self.device, memory, self.expected)


class Unreached:
    """An event of the engine's that has not come yet."""

    def query(self) -> bool:
        return False


def test_what_is_compiled_first_is_not_short(accelerator: Accelerator) -> None:
    accelerator._launched.clear()
    landing = Landing(accelerator, CASE)
    first, memory = landing.planned()
    assert not first.short()
    landing.lands(first, memory)
    second, memory = landing.planned()
    assert second.short()
    landing.lands(second, memory)


def test_a_landing_that_waits_is_not_short(accelerator: Accelerator) -> None:
    landing = Landing(accelerator, CASE)
    landing.lands(*landing.planned())
    assert not landing.planned(after=Unreached())[0].short()
    plan, _ = landing.planned()
    with contextlib.ExitStack() as others:
        while accelerator._lanes.any_idle():
            others.enter_context(accelerator._lanes.taken())
        assert not plan.short()
    assert plan.short()


def test_conversions_on_the_host_are_not_short(accelerator: Accelerator) -> None:
    landing = Landing(accelerator, replace(CASE, codec="int8_per_token_head"))
    for _ in range(2):
        plan, memory = landing.planned()
        assert not plan.short()
        landing.lands(plan, memory)


@pytest.mark.parametrize("known", [True, False], ids=["compiled", "not compiled"])
def test_planning_waits_for_no_other_threads_compiler(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    monkeypatch.setattr(accelerator, "host_masks", 0)
    landing = Landing(accelerator, CASE)
    landing.lands(*landing.planned())
    if not known:
        accelerator._launched.clear()
    compiling, done = threading.Event(), threading.Event()

    def compiler() -> None:
        with accelerator._launching:
            compiling.set()
            done.wait(60)

    thread = threading.Thread(target=compiler)
    thread.start()
    compiling.wait(60)
    try:
        start = time.monotonic()
        plan, memory = landing.planned()
        assert not plan.short()
        assert time.monotonic() - start < 50
    finally:
        done.set()
        thread.join()
    landing.lands(plan, memory)
    plan, memory = landing.planned()
    assert plan.short()
    landing.lands(plan, memory)
