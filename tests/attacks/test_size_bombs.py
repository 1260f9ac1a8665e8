"""Sizes that would cost memory, read in a process that has almost none to spare."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.attacks import w03_truncated, w05_too_large, w24_payload_size

ROOM = 64 << 20
BOMBS = {
    attack.name: attack
    for module in (w03_truncated, w05_too_large, w24_payload_size)
    for attack in module.attacks()
    if attack.resealed and any(word in attack.name for word in ("GiB", "2**", "the most", "65535", "stated"))
}

READER = f"""
import resource, sys
from tests.attacks.attack import refusal
refusal(b"")
refusal(open(sys.argv[1], "rb").read())
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + {ROOM},) * 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[2:]:
    print(refusal(open(path, "rb").read()).clause)
print("grown", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_are_refused_within_64_mib_of_address_space(tmp_path):
    from tests.attacks.build import honest_small

    (tmp_path / "honest").write_bytes(honest_small().pack())
    paths = []
    for number, attack in enumerate(BOMBS.values()):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(attack.data)
    command = [sys.executable, "-c", READER, str(tmp_path / "honest"), *map(str, paths)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *clauses, grown = done.stdout.splitlines()
    assert clauses == [attack.refusal.clause for attack in BOMBS.values()]
    assert int(grown.split()[1]) < 16 * 1024, "KiB of resident memory"


def test_the_limit_of_address_space_bites():
    """The process above would fail if it allocated what the bombs announce."""
    script = READER + f"\nbytearray({2 * ROOM})\n"
    done = subprocess.run(
        [sys.executable, "-c", script, "/dev/null"], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert "MemoryError" in done.stderr


def test_there_are_bombs_of_every_kind():
    assert len(BOMBS) >= 12


INSPECTOR = """
import resource, sys
from bridge.cli.main import main
main(["inspect", sys.argv[1]])
with open("/proc/self/statm") as statm:
    size = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (int(sys.argv[3]) << 20),) * 2)
sys.exit(main(["inspect", sys.argv[2]]))
"""


@pytest.mark.parametrize(("mib", "code", "words"), [(64, 1, "bad_tag"), (16, 2, "more memory")])
def test_a_sparse_file_of_769_mib_fails_at_its_first_run(tmp_path, mib, code, words):
    """Its manifest is sealed, its payload was never written. Its runs have 32 MiB: where memory holds none, that is no damage."""
    from tests.attacks.build import BF16, PAYLOAD, codec, group, honest_small, layer

    honest = honest_small()
    (tmp_path / "honest").write_bytes(honest.pack())
    honest.groups[:] = [group(8, 128, 0, 1 << 16)]
    honest.codecs[:] = [codec(BF16, BF16)]
    honest.layers[:] = [layer(index) for index in range(3)]
    size = 3 * 8 * 4096 * (8192 + 8)
    honest.section(PAYLOAD).head.update(chunk_tokens=1 << 16, payload_bytes=size)
    honest.stated_payload, honest.payload = size, b""
    with (tmp_path / "sparse").open("wb") as file:
        head = honest.pack()
        file.write(head)
        file.truncate(len(head) + size)
    command = [sys.executable, "-c", INSPECTOR, str(tmp_path / "honest"), str(tmp_path / "sparse"), str(mib)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in (done.stdout if code == 1 else done.stderr)
