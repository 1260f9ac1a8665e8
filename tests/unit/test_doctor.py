"""kvbridge doctor: what it says was tried, and what does not work is said in one sentence."""

from __future__ import annotations

import json

import pytest

from bridge.cli import doctor, main
from bridge.transfer import choose
from bridge.transfer.errors import AgentUnavailable


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "device_report", lambda: {"cpu": {"works": True, "says": "a processor"}})


def test_tries_the_stream_agent():
    one = doctor.agent_report("stream")
    assert one["works"]
    assert one["gbps"] > 0
    assert one["says"].startswith("TLSv1.3 ")
    assert one["trust"].endswith("for any network")


def test_warns_of_untrusted_networks(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "probe", lambda kind: (1.5, f"{kind} over something"))
    assert main.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind, warned in (("nixl", True), ("ucx", True), ("stream", False)):
        at = next(i for i, line in enumerate(lines) if line.split()[:1] == [kind])
        assert "1.50 GB/s over loopback" in lines[at]
        assert ("trusted networks only" in lines[at + 1]) == warned


def test_what_is_missing_is_one_sentence_and_the_exit_code(monkeypatch, capsys):
    def missing(kind):
        raise AgentUnavailable(f"{kind} is not installed", remedy="pip install it")

    monkeypatch.setattr(doctor, "probe", missing)
    assert main.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert set(report["agents"]) == set(choose.KINDS)
    assert report["agents"]["ucx"] == {"works": False, "says": "ucx is not installed; pip install it", "trust": doctor.TRUST["ucx"]}


def test_other_bytes_are_a_failure(monkeypatch):
    import numpy as np

    monkeypatch.setattr(np, "array_equal", lambda a, b: False)
    one = doctor.agent_report("stream")
    assert not one["works"]
    assert "other bytes" in one["says"]


def test_there_is_no_such_agent():
    with pytest.raises(AgentUnavailable, match="choose one of nixl, ucx, stream"):
        choose.open_agent("carrier-pigeon", "x", identity=None, peers={}, serves=False)
