"""docs/security.md names tests: each exists, each threat has one, and what the page says of defaults is so."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE)))


def test_there_is_something_to_check():
    assert len(NAMED) > 40


@pytest.mark.parametrize("name", NAMED)
def test_every_test_that_is_named_exists(name):
    path, function = name.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("section", ["Threats", "What others got wrong"])
def test_every_row_of_the_tables_names_a_test(section):
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    rows = [row for row in rows if not row.startswith("| ---")]
    assert len(rows) > 7
    for row in rows:
        assert "tests/" in row.rsplit(" | ", 1)[1], row


def test_nothing_is_mentioned_in_another_form():
    """So that no name escapes the check above."""
    assert set(re.findall(r"tests/[\w/]+\.py(?:::\w+)?", PAGE)) == set(NAMED)


def test_ports_listen_on_loopback_by_default():
    from bridge.handoff import Prefiller
    from bridge.transfer.choose import open_agent
    from bridge.transfer.stream import StreamAgent
    from bridge.vllm.config import Entries

    for function in (Prefiller.__init__, StreamAgent.__init__, open_agent):
        assert inspect.signature(function).parameters["host"].default == "127.0.0.1"
    assert Entries.__struct_defaults__[Entries.__struct_fields__.index("listen") - 4] == "127.0.0.1"
