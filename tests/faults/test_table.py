"""The fault table, a seeded sample: each fault at each step once. The whole: `python -m tests.faults.run --runs 10000`."""

import random

import pytest

from backends.cpu import reference
from tests.faults.faulty_agent import DATA_FAULTS
from tests.faults.rig import UNHURRIED, Ended, Rig, Wrong
from tests.faults.run import printed, run, table
from tests.faults.scenarios import CELLS, FAULTS, disconnect

SEED = 20261130
CORRUPTING = ("lose", "truncate", "reorder", "misdirect", "corrupt")
"""Faults of the data that the agent reports as success: only the tags stand between them and the pages."""


@pytest.mark.slow
def test_every_fault_at_every_step_ends_in_the_right_bytes_or_a_typed_counted_failure():
    rows, wrong = run(range(len(CELLS)), SEED, rigs=8)
    assert wrong == []
    assert len(rows) == len(CELLS)
    counted = table(rows)
    for again in (1, 2):
        if met_at_nearly_every_step(counted):
            break
        # Some cannot be met by every seed; on a busy machine a time-out may come first. Tried anew, and fewer at a time.
        unmet = [number + again * len(CELLS) for number, (count, *_) in enumerate(counted.values()) if not count]
        more, wrong = run(unmet, SEED, rigs=2)
        assert wrong == []
        rows += more
        counted = table(rows)
    assert met_at_nearly_every_step(counted), "\n".join(printed(counted))
    for kind in CORRUPTING:
        said = [decoders for (fault, _), (_, decoders, _) in counted.items() if fault == f"data: {kind}"]
        assert not any(counts["right"] for counts in said), "bytes that are others were never accepted"


def met_at_nearly_every_step(counted):
    """Whether every fault was met somewhere, and most at each of their steps."""
    met = {fault for (fault, _), (count, *_) in counted.items() if count}
    return met == {fault.name for fault in FAULTS} and sum(count > 0 for count, *_ in counted.values()) > 0.85 * len(CELLS)


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path, UNHURRIED)
    yield made
    made.close()


@pytest.mark.parametrize("kind", CORRUPTING)
def test_without_verification_the_judge_finds_wrong_content(rig, monkeypatch, kind):
    """The product has no such switch. What this run accepts, the tags refuse in every other."""
    assert kind in DATA_FAULTS
    monkeypatch.setattr(reference, "verify_tags", lambda *arguments: None)
    fault = next(fault for fault in FAULTS if fault.name == f"data: {kind}")
    for number, step in enumerate(fault.steps):
        assert any(goes_wrong(rig, fault, step, number, attempt) for attempt in range(5)), step


def goes_wrong(rig, fault, step, number, attempt):
    """Whether this run ended in wrong content. What is corrupted may be a tag, or bytes that come right."""
    # To settle ends connections. A claim over one whose end has not been noticed yet would leave a lease of two minutes behind.
    disconnect(rig)
    try:
        fault.run(rig, step, random.Random(1000 * attempt + number))
    except Wrong as found:
        return "wrong content was committed" in str(found) or "bytes of something else" in str(found)
    finally:
        rig.settle()
    return False


def test_the_same_number_of_the_same_seed_is_the_same_run(rig):
    from tests.faults.scenarios import run_one

    number = next(number for number, (fault, step) in enumerate(CELLS) if fault.name == "data: corrupt")
    answers = [run_one(rig, number, SEED) for _ in range(2)]
    assert answers[0][:2] == answers[1][:2] == ("data: corrupt", "first chunk")
    assert [str(one) for one in answers[0][2]] == [str(one) for one in answers[1][2]] == ["bad_tag/bad_tag"]
    assert answers[0][3]


def test_only_what_was_met_is_printed_and_the_rest_is_counted():
    cells = [(fault.name, step) for fault, step in CELLS]
    rows = [(number, *cell, [Ended("bad_tag", "right")], number > 0) for number, cell in enumerate(cells)]
    head, *met, rest = printed(table(rows))
    assert head.startswith("fault")
    assert len(met) == len(cells) - 1
    assert met[0].split() == " ".join([*cells[1], "1", "bad_tag 1;", "right 1"]).split()
    assert rest == f"not met: 1 of {len(cells)} cells: {' at '.join(cells[0])}"
    assert printed(table(rows[:2]))[-1] == f"not met: {len(cells) - 1} of {len(cells)} cells", "too many to be named"
    assert len(printed(table([(*row[:4], True) for row in rows]))) == 1 + len(cells), "nothing is said of none"
