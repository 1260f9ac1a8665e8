"""Files that are no ordinary .kvb files are refused without blocking and without a traceback."""

import os

import pytest

from bridge.cli.main import main
from bridge.pages import BlockTable, PagesDoNotFit
from bridge.wire import read_container


def test_what_is_no_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            read_container(path)


def test_the_command_says_one_sentence(tmp_path, capsys):
    empty = tmp_path / "empty.kvb"
    empty.write_bytes(b"")
    assert main(["inspect", str(empty)]) == 1
    assert "truncated" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "missing.kvb")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_wild_token_range_costs_no_memory():
    with pytest.raises(PagesDoNotFit):
        BlockTable([0, 1], 16).locate(0, 1 << 60, 2)
