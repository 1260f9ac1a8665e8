"""Runs the attacks of every clause's file, and sees to it that every clause has its file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from bridge.errors import all_error_types
from bridge.wire import errors
from tests.attacks import build
from tests.attacks.attack import ALLOWANCE, Attack, peak_of, read, refusal
from tests.creader import build as creader

CLAUSES = {clause: error for clause, error in all_error_types(errors.WireError).items() if error is not errors.WireError}
FILES = sorted(path.stem for path in Path(__file__).parent.glob("w[0-9][0-9]_*.py"))


def attacks_of(stem: str) -> list[Attack]:
    return list(importlib.import_module(f"tests.attacks.{stem}").attacks())


def test_every_clause_has_its_file():
    stems = {f"w{re.match('W([0-9]+)', error.__doc__)[1]}_{clause}" for clause, error in CLAUSES.items()}
    assert stems == set(FILES)
    assert [stem[1:3] for stem in FILES] == [f"{number:02}" for number in range(1, len(FILES) + 1)]


@pytest.mark.parametrize("stem", FILES)
def test_clause(stem):
    attacks = attacks_of(stem)
    error_type = importlib.import_module(f"tests.attacks.{stem}").ERROR
    assert CLAUSES[stem[4:]] is error_type
    failures = []
    for attack in attacks:
        error, peak = peak_of(attack.data)
        if type(error) is not attack.refusal:
            failures.append(f"{attack.name}: refused by {error!r}, not by {attack.refusal.__name__}")
        if peak > ALLOWANCE + 3 * len(attack.data):
            failures.append(f"{attack.name}: {peak} bytes at the peak for an attack of {len(attack.data)}")
    assert not failures, "\n".join(failures)
    hits = [attack for attack in attacks if attack.refusal is error_type]
    assert len({attack.name for attack in attacks}) == len(attacks)
    assert any(attack.resealed for attack in hits)
    assert any(not attack.resealed for attack in attacks)
    assert len(hits) >= len(attacks) // 2


@pytest.mark.parametrize("stem", FILES)
def test_the_c_reader_gives_the_same_clause(stem):
    reader = creader.load()
    failures = []
    for attack in attacks_of(stem):
        verdict = reader.verdict(attack.data)
        if verdict != attack.refusal.clause:
            failures.append(f"{attack.name}: {verdict}, not {attack.refusal.clause}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", build.HONEST)
def test_the_honest_containers_are_accepted(name):
    """Without this, every attack could be refused for a fault of the attack's own writer."""
    raw = build.HONEST[name]()
    manifest = read(raw.pack())
    assert manifest.lease == raw.request["lease"]
    assert manifest.request_id.encode() == raw.sections[2].tail


@pytest.mark.parametrize("name", build.HONEST)
def test_every_truncation_is_refused(name):
    whole = build.HONEST[name]().pack()
    for size in range(len(whole)):
        assert isinstance(refusal(whole[:size]), errors.Truncated), size


def test_every_single_bit_of_a_container_is_refused():
    whole = bytearray(build.honest_newer().pack())
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert refusal(bytes(whole)) is not None, f"bit {bit}"
        whole[bit // 8] ^= 1 << bit % 8
