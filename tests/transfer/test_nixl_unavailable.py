"""No wheel, or a UCX that refuses to start: one sentence with the library's reason and what to do."""

from __future__ import annotations

import sys

import pytest

from bridge.transfer.errors import AgentUnavailable
from bridge.transfer.nixl import NixlAgent, library


def test_installed_but_broken(monkeypatch, tmp_path):
    (tmp_path / "nixl_broken").mkdir()
    (tmp_path / "nixl_broken" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULES", ("nixl_broken", "nixl_that_nobody_has"))
    with pytest.raises(AgentUnavailable, match=r"libcuda\.so\.1: cannot open"):
        NixlAgent("decoder")


def test_the_first_that_loads_is_taken(monkeypatch):
    monkeypatch.setattr(library, "MODULES", ("nixl_that_nobody_has", *library.MODULES))
    assert library.load().__name__ in {f"{name}._api" for name in library.MODULES}
    assert sys.modules


def test_a_transport_that_ucx_does_not_have():
    with pytest.raises(AgentUnavailable, match="nonsense' is not available") as caught:
        NixlAgent("decoder", transports=["nonsense"])
    assert "from the configuration" in str(caught.value)
    assert "\n" not in str(caught.value)
