"""The fuzzer's corpus is what it says, every input of it passes, and the targets would notice a finding."""

from __future__ import annotations

import pytest

from bridge.handoff import messages
from bridge.wire import open_sealed
from tests.attacks import build
from tests.fuzz import targets
from tests.fuzz.targets import CORPUS, Finding, honest_inputs, one_input

FILES = sorted(path.name for path in CORPUS.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_corpus_passes(name):
    one_input((CORPUS / name).read_bytes())


def test_the_corpus_is_written_by_this_version():
    """Where this fails after a change of format or messages: python -m tests.fuzz.atheris_target --write-corpus."""
    assert {name: (CORPUS / name).read_bytes() for name in FILES if name in honest_inputs()} == honest_inputs()
    assert {type(messages.decode(data[1:])) for name, data in honest_inputs().items() if name.startswith("message")} == set(
        messages.Message.__args__
    )


def test_targets_reach_what_is_behind_the_seal():
    manifest = bytearray(build.honest_small().manifest())
    manifest[-1] ^= 1
    assert open_sealed(targets.resealed(bytes(manifest), build.KEY), build.KEY).request_id == "request-1"


def test_a_manifest_read_wrongly_is_a_finding(monkeypatch):
    real = targets.open_sealed
    other = real(build.honest_rotated().manifest(), build.KEY)
    monkeypatch.setattr(targets, "open_sealed", lambda data, key: other)
    with pytest.raises(Finding):
        one_input(b"m" + build.honest_small().manifest())


def test_other_exceptions_are_findings(monkeypatch):
    def broken(data: bytes, key: bytes) -> None:
        raise KeyError("x")

    monkeypatch.setattr(targets, "open_sealed", broken)
    with pytest.raises(KeyError):
        one_input(b"m" + bytes(99))
