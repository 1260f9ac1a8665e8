"""Links between the pages lead somewhere, and the operators' table in docs/reliability.md knows every clause of a hand-off."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bridge.handoff.errors
import bridge.transfer.errors
import bridge.vllm.errors
from bridge.errors import KVBridgeError, all_error_types
from bridge.wire.errors import BadTag

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NOT_AN_OPERATORS = {"handoff", "transfer", "incompatible", "connector", "bad_range", "cannot_load"}
"""Roots that nothing is raised as (cannot_load has another's clause), and a program's mistake."""


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def test_there_is_something_to_check():
    assert sum(len(links(page)) for page in PAGES) > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_operators_find_every_clause_of_a_hand_off():
    section = (ROOT / "docs" / "reliability.md").read_text().split("## What you see, and what to do\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = {clause for row in rows for clause in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    modules = (bridge.handoff.errors, bridge.transfer.errors, bridge.vllm.errors)
    types = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, KVBridgeError)]
    clauses = {kind.clause for kind in [*types, BadTag]} - {KVBridgeError.clause}
    assert len(clauses) > 30
    assert clauses - NOT_AN_OPERATORS <= named
    counters = {"commit_unconfirmed", "quarantined", "held", "refused", "registration_kept"}
    assert named - set(all_error_types()) == counters, "nothing is listed that does not exist"


def test_the_lines_that_no_card_has_run_are_still_those_lines():
    """The list is made by `python -m tests.xpu.unexecuted --write`, which takes a minute and is forgotten when the code changes."""
    page = (ROOT / "docs" / "xpu.md").read_text()
    made = re.search(r"<!-- begin: python -m tests\.xpu\.unexecuted --write -->(.*)<!-- end -->", page, re.DOTALL).group(1)
    listed = re.findall(r"`(backends/[^`]+)`\n\n```\n(.*?)```", made, re.DOTALL)
    assert listed
    for path, block in listed:
        code = (ROOT / path).read_text().splitlines()
        for line in block.splitlines():
            number, words = re.fullmatch(r" *(\d+) (.*)", line).groups()
            assert code[int(number) - 1] == words, f"{path}:{number}"
