"""The C reader, written from the specification alone, and the Python reader agree: on the vectors, on random payloads, on mutations.

KVB_RANDOM_PAYLOADS=100000 runs the long comparison; KVB_RANDOM_FIRST is its first seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import all_error_types
from bridge.wire import CodingKind, Group, Layer, Manifest, SlotCodec, errors, open_sealed, seal
from bridge.wire.coding import opaque
from tests.creader.build import SOURCE, load, program
from tests.wire.random_payloads import (
    assemble,
    mutate,
    python_dump,
    python_rows,
    python_verdict,
    random_container,
    random_manifest,
    reseal,
    sections,
)

VECTORS = sorted((Path(__file__).parent.parent / "vectors").glob("*.kvb"))
PAYLOADS = int(os.environ.get("KVB_RANDOM_PAYLOADS", "2000"))
FIRST = int(os.environ.get("KVB_RANDOM_FIRST", "0"))
CLAUSES = set(all_error_types(errors.WireError)) - {errors.WireError.clause}


def test_the_reader_has_at_most_500_lines_and_no_includes_but_the_c_library():
    lines = SOURCE.read_text().splitlines()
    assert len(lines) <= 500
    assert {line for line in lines if line.startswith("#include")} == {
        f"#include <{name}.h>" for name in ("math", "stdint", "stdio", "stdlib", "string")
    }
    assert not [line for line in lines[: lines.index("#ifdef KVB_MAIN")] if "alloc(" in line]


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vector(path):
    data, expected, reader = path.read_bytes(), json.loads(path.with_suffix(".json").read_text()), load()
    assert reader.verdict(data) == "ok"
    assert reader.dump(data).splitlines() == expected["manifest"]
    assert expected["decoded"]
    for side in expected["decoded"]:
        rows = reader.decode(data, side["layer"], side["head"], "KV".index(side["side"]), side["row_bytes"])
        assert len(rows) == side["rows"]
        assert hashlib.sha256(rows.tobytes()).hexdigest() == side["sha256"], side
    payload_bytes = next(int(line.split()[2]) for line in expected["manifest"] if line.startswith("payload "))
    for span in expected["spans"]:
        for head, tags in enumerate(span["tags"]):
            at = len(data) - payload_bytes + span["offset"] + head * span["run_bytes"] + span["blocks"] * span["block_bytes"]
            for block, tag in enumerate(tags):
                assert data[at + 8 * block : at + 8 * block + 8] == bytes.fromhex(tag)[::-1]
                damaged = bytearray(data)
                damaged[at + 8 * block] ^= 1
                assert reader.verdict(bytes(damaged)) == "bad_tag"


def _compare_values(manifest: Manifest, payload: bytes, data: bytes) -> int:
    compared = 0
    for i, layer in enumerate(manifest.layers):
        for side, coding in enumerate((manifest.codecs[layer.codec].key, manifest.codecs[layer.codec].value)):
            if coding.kind is CodingKind.NONE:
                assert load().decode(data, i, 0, side, 64) is None
                continue
            for head, rows in enumerate(python_rows(manifest, payload, i, side)):
                found = load().decode(data, i, head, side, rows.shape[1])
                assert np.array_equal(found, rows), f"layer {i}, head {head}, {coding}"
                compared += 1
    return compared


@pytest.mark.timeout(0 if PAYLOADS > 5000 else 300)
@pytest.mark.slow
def test_random_payloads_and_mutations():
    reader, seen, sides = load(), Counter(), 0
    for seed in range(FIRST, FIRST + PAYLOADS):
        rng = np.random.default_rng(seed)
        container = random_container(rng)
        data = container.to_bytes()
        assert (python_verdict(data), reader.verdict(data)) == ("ok", "ok"), f"seed {seed}"
        assert reader.dump(data) == python_dump(container.manifest), f"seed {seed}"
        sides += _compare_values(container.manifest, container.payload, data)
        for number in range(2):
            mutated, sealed = mutate(rng, container)
            verdict = python_verdict(mutated)
            assert reader.verdict(mutated) == verdict, f"seed {seed}, mutation {number}"
            assert sealed or verdict != "ok" or mutated == data, f"seed {seed}, mutation {number}: accepted"
            seen[verdict] += 1
            if verdict == "ok":
                size = int.from_bytes(mutated[8:12], "little")
                manifest = open_sealed(mutated[64 : 64 + size], mutated[16:48])
                assert reader.dump(mutated) == python_dump(manifest), f"seed {seed}, mutation {number}"
                assert _compare_values(manifest, mutated[64 + size + -size % 64 :], mutated), f"seed {seed}, mutation {number}"
    print(f"\n{PAYLOADS} payloads, {sides} sides of heads, mutations: {dict(seen.most_common())}")
    assert sides > PAYLOADS
    if PAYLOADS >= 1000:
        assert CLAUSES - set(seen) == set(), "clauses that no mutation reached"


def test_bare_manifests():
    reader, seen = load(), Counter()
    for seed in range(300):
        rng = np.random.default_rng(seed)
        container = random_container(rng)
        assert reader.manifest_verdict(container.sealed, container.key) == "ok"
        body = bytearray(container.sealed[:-32])
        body[int(rng.integers(len(body)))] = int(rng.integers(256))
        for data in (
            reseal(bytes(body), container.key),
            container.sealed + b"\0",
            container.sealed[: int(rng.integers(len(container.sealed)))],
        ):
            try:
                open_sealed(data, container.key)
                expected = "ok"
            except errors.WireError as error:
                expected = error.clause
            assert reader.manifest_verdict(data, container.key) == expected, f"seed {seed}"
            seen[expected] += 1
        assert reader.manifest_verdict(container.sealed, bytes(32)) == "bad_seal"
    assert seen["truncated"] >= 300
    assert seen["trailing_bytes"] >= 300


def test_a_payload_of_too_many_blocks():
    """2**34 blocks and some: every field within its limit, and a product that needs more than 64 bits with opaque rows of a megabyte."""
    side = opaque("example/large", 1 << 20)
    base = random_manifest(np.random.default_rng(0))
    fields = {**base.__dict__, "groups": (Group(1024, 16, 0, 16),), "codecs": (SlotCodec(side, side),)}
    for layers, clause in ((1024, "too_large"), (17, "too_large"), (16, "payload_size")):
        manifest = Manifest(**{**fields, "layers": tuple(Layer(i, 0, 0) for i in range(layers))})
        body = bytearray(seal(manifest, bytes(32))[:-32])
        at = {kind: offset for kind, offset, _ in sections(body)}[6] + 8
        struct.pack_into("<Q", body, at + 24, 1 << 24)
        data = assemble(reseal(bytes(body), bytes(32)), bytes(32), b"")
        assert (python_verdict(data), load().verdict(data)) == (clause, clause)


@pytest.mark.slow
def test_sanitized_program(tmp_path):
    """The command under the address and undefined-behaviour sanitizers: every vector, and mutations, some of them accepted."""
    files, expected = [], []
    for path in VECTORS:
        files.append(path)
        expected.append("ok")
    for seed in range(400):
        rng = np.random.default_rng(10**6 + seed)
        container = random_container(rng)
        data = mutate(rng, container)[0] if seed % 4 else container.to_bytes()
        files.append(tmp_path / f"{seed}.kvb")
        files[-1].write_bytes(data)
        expected.append(python_verdict(data))
    result = subprocess.run([program(sanitized=True), *files], capture_output=True, text=True, check=False, timeout=240)
    assert result.stderr == ""
    assert result.returncode == 1
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("verdict")] == expected
    assert result.stdout.count("rows ") > len(files)


def test_program_reports_missing_files(tmp_path):
    result = subprocess.run([program(), tmp_path / "absent"], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "absent" in result.stderr
