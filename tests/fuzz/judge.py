"""Says of a mutant whether the readers treated it rightly: refused by a typed error, or accepted with the meaning that its bytes have."""

from __future__ import annotations

import io
import math
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bridge.codecs import reference
from bridge.wire import BLOCK_TOKENS, CodingKind, Manifest, PayloadMap, seal, write_container
from bridge.wire.errors import WireError
from bridge.wire.tags import split_runs
from tests.attacks import build
from tests.attacks.attack import read
from tests.fuzz.mutate import Mutant
from tests.fuzz.plain import Plain, decode_row, read_plainly

ACCEPTED = "accepted"
MAX_SECONDS = 1.0
"""CPU time that one small mutant may cost a reader."""
VALUES_EVERY = 5
"""One in so many accepted mutants is decoded as well."""

SecondJudge = Callable[[bytes], str]
"""The clause by which another reader refuses, or ACCEPTED."""


class Fault(Exception):
    """A reader did what it must not."""


def dump(m: Manifest) -> tuple[Any, ...]:
    """Every field of a parsed manifest, as plain values."""
    contents = tuple((int(kind), digest) for kind, digest in m.content)
    shard = (m.shard.tp_rank, m.shard.tp_size, m.shard.pp_rank, m.shard.pp_size)
    groups = tuple((int(g.kind), g.head_dim, g.heads, g.head_first, g.head_count, g.window, g.first_token, g.end_token) for g in m.groups)
    codecs = tuple(
        (int(s.kind), s.bits, int(s.element), int(s.rotation), s.row_bytes, s.digest) for c in m.codecs for s in (c.key, c.value)
    )
    layers = tuple((x.index, x.group, x.codec, int(x.source), x.key_scale, x.value_scale) for x in m.layers)
    place = (m.request_id.encode(), m.lease, m.generation, shard, m.chunk_tokens)
    return m.minor, m.model_digest, contents, *place, groups, codecs, layers


def check_meaning(manifest: Manifest, plain: Plain) -> None:
    """Raises Fault unless the parsed manifest and the payload's places and tags are those of the naive reading."""
    if dump(manifest) != plain.dump():
        raise Fault(f"the manifest was read as {dump(manifest)}, its bytes say {plain.dump()}")
    blocks = plain.blocks()
    if not len(plain.payload) == plain.payload_bytes == blocks[-1].plane_end == PayloadMap(manifest).payload_bytes:
        raise Fault(f"a payload of {len(plain.payload)} bytes was accepted, the manifest's fields give {blocks[-1].plane_end}")
    covered = bytearray(len(plain.payload))
    for b in blocks:
        block = plain.payload[b.offset : b.offset + b.nbytes]
        stored = int.from_bytes(plain.payload[b.tag : b.tag + 8], "little")
        if stored != build.tag(block, b.first, b.end, b.ordinal, plain.key, plain.lease, plain.generation):
            raise Fault(f"block {b} was accepted, its tag is wrong")
        at = 0
        for width in b.rows:
            plane = block[at : at + 16 * width]
            if any(plane[: b.first * width]) or any(plane[b.end * width :]):
                raise Fault(f"block {b} was accepted with something in rows that are not valid")
            at += 16 * width
        covered[b.offset : b.offset + b.nbytes] = b"\1" * b.nbytes
        covered[b.tag : b.tag + 8] = b"\1" * 8
    payload, seen = np.frombuffer(plain.payload, np.uint8), np.frombuffer(covered, np.uint8)
    if payload[seen == 0].any():
        raise Fault("a payload was accepted with something in bytes that belong to no block and no tag")


def check_encoding(manifest: Manifest, plain: Plain, data: bytes) -> None:
    """Raises Fault if the same meaning has other bytes: what was accepted must be what the writer would write."""
    sealed = seal(manifest, plain.key)
    if any(kind >= 0x8000 for kind, _ in plain.sections):
        if sealed != plain.known_manifest():
            raise Fault("a manifest with skipped sections was read as something else than its known sections say")
        return
    out = io.BytesIO()
    write_container(out, manifest, plain.key, plain.payload)
    if out.getvalue() != data:
        raise Fault("two different containers have the same meaning")


def check_values(manifest: Manifest, plain: Plain) -> None:
    """Raises Fault unless every valid row decodes to the values of the naive reading, to a relative 1e-5 of the vector's greatest."""
    layout, data = PayloadMap(manifest), np.frombuffer(plain.payload, np.uint8)
    values: dict[tuple[int, int, int, int], list[list[float]]] = {}
    for index in range(layout.chunk_count):
        for span in layout.chunk(index).spans:
            layer = manifest.layers[span.layer]
            codec, dim = manifest.codecs[layer.codec], manifest.groups[layer.group].head_dim
            blocks, _ = split_runs(data[span.offset : span.offset + span.nbytes], span)
            planes = codec.planes(dim)
            for side, (coding, scale) in enumerate(((codec.key, layer.key_scale), (codec.value, layer.value_scale))):
                if coding.kind is CodingKind.NONE:
                    continue
                rows = [
                    np.ascontiguousarray(blocks[..., p.offset : p.offset + p.nbytes]).reshape(
                        span.heads, span.blocks, BLOCK_TOKENS, p.row_bytes
                    )
                    for p in (planes[side], planes[side + 2])
                ]
                with np.errstate(all="ignore"):
                    opaque = coding.kind is CodingKind.OPAQUE
                    decoded = rows[0].astype(np.float32) if opaque else reference.decode(rows[0], rows[1], coding, dim, scale)
                for head in range(span.heads):
                    for block in range(span.blocks):
                        values[span.layer, head, span.first_block + block, side] = decoded[head, block].tolist()
    for b in plain.blocks():
        row = plain.layers[b.layer]
        codec_row, dim = plain.codecs[row["codec"]], plain.groups[row["group"]]["head_dim"]
        starts = [b.offset + 16 * sum(b.rows[:i]) for i in range(4)]
        for side, name in enumerate(("key", "value")):
            coding_row = {field: codec_row[f"{name}_{field}"] for field in ("kind", "bits", "element")}
            if coding_row["kind"] == 0:
                continue
            for t in (b.first, b.end - 1):
                parts = [plain.payload[starts[i] + t * b.rows[i] : starts[i] + (t + 1) * b.rows[i]] for i in (side, side + 2)]
                expected = decode_row(parts[0], parts[1], coding_row, dim, row[f"{name}_scale"])
                _check_row(values[b.layer, b.head, b.number, side][t], expected, f"{name} of {b}, row {t}")


def _check_row(got: list[float], expected: list[float], what: str) -> None:
    greatest = max((abs(x) for x in expected if math.isfinite(x)), default=0.0)
    if len(got) != len(expected):
        raise Fault(f"{what} has {len(got)} values, not {len(expected)}")
    for x, y in zip(got, expected, strict=True):
        if math.isfinite(y) and abs(y) < 3e38:
            # Where some element is near the limit of fp32, sums over the vector may overflow there: nothing to compare.
            if greatest < 3e38 and not abs(x - y) <= 1e-5 * greatest + 1e-37:
                raise Fault(f"{what} decodes to {x}, its bytes say {y}")
        elif math.isfinite(x) and abs(x) < 3e38:
            raise Fault(f"{what} decodes to {x}, its bytes say {y}")


def find_second_judge() -> SecondJudge | None:
    """The reader in C, where it can be compiled."""
    try:
        from tests.creader import build as creader
    except ImportError:
        return None
    reader = creader.load()
    return lambda data: ACCEPTED if (clause := reader.verdict(data)) == "ok" else clause


@dataclass
class Judge:
    """Judges mutants and counts. originals: the honest containers. second: another reader, or None."""

    originals: frozenset[bytes]
    second: SecondJudge | None = None
    hits: Counter[str] = field(default_factory=Counter)
    hits_repaired: Counter[str] = field(default_factory=Counter)
    accepted_unchanged: int = 0
    decoded: int = 0
    slowest: float = 0.0
    slowest_how: str = ""

    def judge(self, mutant: Mutant) -> str:
        """The clause, or ACCEPTED. Raises Fault."""
        manifest, start = None, time.thread_time()
        try:
            manifest = read(mutant.data)
            verdict = ACCEPTED
        except WireError as error:
            verdict = error.clause
        except Exception as error:
            raise Fault(f"the reader raised {type(error).__name__}: {error}") from error
        seconds = time.thread_time() - start
        if seconds > self.slowest:
            self.slowest, self.slowest_how = seconds, mutant.how
        if seconds > MAX_SECONDS:
            raise Fault(f"the reader took {seconds} s of CPU time, the limit is {MAX_SECONDS}")
        self.hits[verdict] += 1
        if mutant.repaired:
            self.hits_repaired[verdict] += 1
        if self.second is not None and (other := self.second(mutant.data)) != verdict:
            raise Fault(f"the readers disagree: {verdict} and {other}")
        if manifest is not None:
            self._accepted(mutant, manifest)
        return verdict

    def _accepted(self, mutant: Mutant, manifest: Manifest) -> None:
        if mutant.data in self.originals:
            self.accepted_unchanged += 1
            return
        if not mutant.repaired:
            raise Fault("bytes that are no honest container were accepted, and nobody used the key on them")
        plain = read_plainly(mutant.data)
        check_meaning(manifest, plain)
        check_encoding(manifest, plain, mutant.data)
        if self.hits[ACCEPTED] % VALUES_EVERY == 0:
            check_values(manifest, plain)
            self.decoded += 1


def resident_kib() -> int:
    """The most memory that this process had at a time, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
