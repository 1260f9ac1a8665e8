"""Registering memory, describing it, giving it back."""

from __future__ import annotations

import re
import subprocess
import sys

from bridge.transfer.nixl.frame import parse_metadata
from tests.transfer.nixl_serving import ROOT


def test_metadata_names_the_agent(make_agent):
    agent = make_agent("prefiller-7 é", serves=True)
    name, native, blob = parse_metadata(agent.metadata())
    assert name == "prefiller-7 é"
    assert native != parse_metadata(make_agent("prefiller-7 é").metadata())[1]
    assert len(blob) > 50


def test_accelerator_memory_without_an_accelerator():
    """Said to be a GPU's on a host without one: refused in words, or taken by UCX for the host memory that it is; never a crash."""
    program = """
from bridge.transfer.errors import RegistrationFailed
from bridge.transfer.nixl import NixlAgent
from tests.transfer.nixl_serving import memory_of, poisoned
import dataclasses
agent = NixlAgent("decoder", serves=False)
for device in ("cuda", "xpu"):
    try:
        agent.register(dataclasses.replace(memory_of(poisoned(4096)), device=device)).release()
        print("accepted", end=" ")
    except RegistrationFailed as error:
        print("refused", end=" ")
print(agent.registered_bytes())
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr[-2000:]
    assert re.fullmatch(r"((accepted|refused) ){2}0\n", run.stdout)
