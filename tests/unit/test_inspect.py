"""What a .kvb file's writer chose cannot forge a line of `kvbridge inspect`, and no name ends in a traceback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.cli.inspect import as_text, printable
from bridge.cli.main import main
from bridge.wire import container
from tests.attacks.build import honest_small

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "x\x1b[2J\x1b[1;32mok\x1b[0m\n/etc/x.kvb: ok",
    "\u202egpj.exe",
    "a\0b\r\x7f\x85\x9b31m",
    "\u2066\u2028\u200b\ufeff",
    "\U0001f600 \xe9",
]


def write(path: Path, request_id: str) -> None:
    path.write_bytes(honest_small(request_id=request_id.encode()).pack())


@pytest.mark.parametrize("request_id", HOSTILE)
def test_a_request_id_is_one_field_of_one_line(tmp_path, capsys, request_id):
    write(tmp_path / "file.kvb", "plain")
    assert main(["inspect", str(tmp_path / "file.kvb")]) == 0
    plain = capsys.readouterr().out.splitlines()
    write(tmp_path / "file.kvb", request_id)
    assert main(["inspect", str(tmp_path / "file.kvb")]) == 0
    text = capsys.readouterr().out
    assert all(c.isprintable() for c in text.replace("\n", ""))
    lines = text.split("\n")[:-1]
    assert len(lines) == len(plain)
    differ = [number for number, pair in enumerate(zip(lines, plain, strict=True)) if pair[0] != pair[1]]
    assert [lines[number].split()[0] for number in differ] == ["request"]
    assert main(["inspect", "--json", str(tmp_path / "file.kvb")]) == 0
    assert json.loads(capsys.readouterr().out)["request"] == request_id


def test_what_is_printable_stays_as_it_is():
    assert printable("request 1, é, 語, \U0001f600, C:\\x") == "request 1, é, 語, \U0001f600, C:\\x"
    assert printable("a\nb\x1b\u202e\udcff") == "a\\nb\\x1b\\u202e\\udcff"
    assert as_text({"file": "a\nb.kvb", "verdict": "ok"}) == "a\\nb.kvb: ok"


def run(path: bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [os.fsencode(sys.executable), b"-m", b"bridge", b"inspect", path]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=60)


@pytest.mark.slow
def test_names_that_a_terminal_cannot_show(tmp_path):
    """A file name that is not UTF-8, with an escape sequence; a request id that the terminal's encoding lacks."""
    name = os.fsencode(tmp_path) + b"/bad\xff\x1b[2J.kvb"
    with open(name, "wb") as file:
        file.write(honest_small(request_id="\U0001f600é".encode()).pack())
    for encoding, shown in (("ascii", rb"\U0001f600\xe9"), ("utf-8", "\U0001f600é".encode())):
        done = run(name, PYTHONIOENCODING=encoding)
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"bad\udcff\x1b[2J.kvb: ok" in done.stdout
        assert shown in done.stdout
        assert not [byte for byte in done.stdout if byte < 0x20 and byte != 10]
    missing = run(name + b"\n\x1b[2J")
    assert missing.returncode == 2
    assert missing.stderr.count(b"\n") == 1
    assert b"\x1b" not in missing.stderr


def test_a_pipe_that_takes_the_files_place_is_not_waited_for(tmp_path):
    """Between a look at the path and its opening; the pipe has no writer."""
    os.mkfifo(tmp_path / "fifo")
    code = (
        "import os, pathlib, sys\n"
        "pathlib.Path.stat = lambda *a, **k: os.stat('README.md')\n"
        "from bridge.cli.main import main\n"
        "sys.exit(main(['inspect', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "fifo")], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no regular file" in done.stderr


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch, capsys):
    class Full(io.BytesIO):
        def read(self, size=-1):
            if size > 1 << 10:
                raise MemoryError
            return super().read(size)

        def fileno(self):
            return self.number

    def opened(path):
        full = Full(path.read_bytes())
        full.number = os.open(path, os.O_RDONLY)
        return full

    write(tmp_path / "file.kvb", "plain")
    monkeypatch.setattr("bridge.cli.inspect.open_container", opened)
    assert main(["inspect", str(tmp_path / "file.kvb")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "more memory" in said.err
    monkeypatch.setattr("bridge.cli.inspect.open_container", container.open_container)
    assert main(["inspect", str(tmp_path / "file.kvb")]) == 0
