"""The demonstration's result, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One codec's hand-off. Times in seconds.

    nbytes: payload bytes, tags included. bf16_bytes: the same KV as bare bf16. tokens: what the second process decoded. expected: what
    local decoding from a cache that went through the reference codec gives. unquantised: what local decoding without any codec gives.
    """

    codec: str
    nbytes: int
    bf16_bytes: int
    pack: float
    transfer: float
    land: float
    total: float
    tokens: list[int]
    expected: list[int]
    unquantised: list[int]

    @property
    def equal(self) -> int:
        """Tokens equal to the expected ones."""
        return sum(a == b for a, b in zip(self.tokens, self.expected, strict=True))

    @property
    def agreement(self) -> int:
        """Tokens equal to those of the unquantised run."""
        return sum(a == b for a, b in zip(self.tokens, self.unquantised, strict=True))

    @property
    def passed(self) -> bool:
        return self.tokens == self.expected


@dataclass(frozen=True)
class Demonstration:
    """What was done, and what came of it."""

    model: str
    prompt_tokens: int
    prompt_end: str
    continuation: str
    layers: int
    block_sizes: tuple[int, int]
    mode: str
    device: str
    transports: str
    processes: tuple[int, int]
    rows: tuple[Row, ...]
    left_over: int
    """Bytes of staging memory that are not free at the end, on both sides."""

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows) and self.left_over == 0


def as_json(result: Demonstration) -> dict[str, Any]:
    """Plain values, with the verdicts."""
    rows = [{**asdict(row), "equal": row.equal, "agreement": row.agreement, "passed": row.passed} for row in result.rows]
    return {**asdict(result), "rows": rows, "passed": result.passed}


def as_text(result: Demonstration) -> str:
    """A table for people."""
    count = len(result.rows[0].tokens)
    prefiller, decoder = result.processes
    lines = [
        "",
        f"{result.model}, {result.layers} layers, bf16 KV cache; {result.prompt_tokens} prompt tokens, {count} decoded",
        f"prefiller: process {prefiller}, pages of {result.block_sizes[0]} tokens   decoder: process {decoder}, "
        f"pages of {result.block_sizes[1]} tokens   device: {result.device}   mode: {result.mode}",
        f"data path: {result.transports}",
        "",
        f"{'codec':<22}{'bytes':>12}{'of bf16':>9}{'pack':>10}{'transfer':>10}{'land':>10}   {'as reference':>13}{'as unquantised':>16}",
    ]
    for row in result.rows:
        lines.append(
            f"{row.codec:<22}{row.nbytes:>12,}{row.nbytes / row.bf16_bytes:>8.1%} {_ms(row.pack):>9} {_ms(row.transfer):>9} "
            f"{_ms(row.land):>9}   {_of(row.equal, count):>13}{_of(row.agreement, count):>16}" + ("" if row.passed else "   WRONG")
        )
    lines += [
        "",
        f"the prompt ends:      {result.prompt_end.strip()!r}",
        f"the decoder went on:  {result.continuation.strip()!r}   ({result.rows[0].codec})",
        "",
    ]
    if result.passed:
        lines.append("Passed: every codec's tokens equal local decoding from a cache that went through the reference codec.")
    elif result.left_over:
        lines.append(f"FAILED: {result.left_over} bytes of staging memory were not given back.")
    else:
        lines.append("FAILED: tokens differ where they must be equal.")
    lines.append("'as unquantised' is the codec's own loss on this prompt; docs/measurements.md has it over many. Times are on CPUs.")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _of(part: int, whole: int) -> str:
    return f"{part}/{whole}"
