"""What UCX's log tells of the transports. It grows for as long as the process lives, and may be asked on an event loop."""

from __future__ import annotations

import os

import pytest

from bridge.transfer.nixl.library import UcxLog

ONE, TWO = "kv" + "1" * 14, "kv" + "2" * 14


def table(agent: str, way: str, operation: str = "read by ucp_get") -> str:
    rows = [f"{agent} inter-node cfg#1", f"remote memory {operation}* into host memory", f"0..inf | zero-copy | {way}"]
    return "".join(f"[0.1] [host:1:0]   | {row} |\n[0.1] [host:1:0]   +-----+\n" for row in rows)


@pytest.fixture
def log(tmp_path):
    """(a UcxLog, a function that writes what UCX would)"""
    path = tmp_path / "ucx.log"
    path.touch()
    made = UcxLog()
    made.fd = os.open(path, os.O_RDONLY)

    def write(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    yield made, write
    os.close(made.fd)


def test_each_agents_own_are_told_and_what_comes_later_is_added(log):
    made, write = log
    assert made.chosen(ONE) == []
    write(table(ONE, "rc_mlx5/mlx5_0") + table(TWO, "tcp/eth0") + table(ONE, "tcp/eth1", "written by ucp_put"))
    assert made.chosen(ONE) == ["inter-node: rc_mlx5/mlx5_0 (zero-copy)"]
    assert made.chosen(TWO) == ["inter-node: tcp/eth0 (zero-copy)"]
    write(table(ONE, "tcp/eth0"))
    assert made.chosen(ONE) == ["inter-node: rc_mlx5/mlx5_0 (zero-copy), tcp/eth0 (zero-copy)"]


def test_a_table_of_which_a_part_is_written_is_read_to_its_end_later(log):
    made, write = log
    text = table(ONE, "tcp/eth0")
    for at in range(len(text)):
        write(text[at])
        found = made.chosen(ONE)
    assert found == ["inter-node: tcp/eth0 (zero-copy)"]


def test_nothing_is_read_twice_and_little_at_a_time(log, monkeypatch):
    """All of it, up to 8 MiB, was read and taken apart for each warning of a slow link."""
    made, write = log
    asked, real = [], os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: asked.append(real(*arguments)) or asked[-1])
    write("x" * 100 + "\n" + table(ONE, "tcp/eth0"))
    write(("y" * 200 + "\n") * 12_000)
    for _ in range(10):
        assert made.chosen(ONE) == ["inter-node: tcp/eth0 (zero-copy)"]
    assert max(map(len, asked)) <= 1 << 20
    assert sum(map(len, asked)) == os.fstat(made.fd).st_size
