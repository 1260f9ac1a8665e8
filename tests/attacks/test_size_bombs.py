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


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
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
