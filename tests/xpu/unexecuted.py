"""The lines of the real XPU's own code that nothing has executed: python -m tests.xpu.unexecuted [--write], on a host without an Intel GPU.

Runs tests/xpu/test_host.py, which has a stand-in for torch.xpu, under a tracer that watches only these files; --write puts the list into
docs/xpu.md. The code that all accelerators share (backends/accelerator, backends/kernels) runs on CUDA and in the emulation, tuning.py in
the emulation: not listed.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
WATCHED = tuple(ROOT / "backends" / "xpu" / name for name in ("device.py", "probe.py"))
DOCUMENT = ROOT / "docs" / "xpu.md"
BEGIN, END = "<!-- begin: python -m tests.xpu.unexecuted --write -->", "<!-- end -->"


def executable(code: CodeType) -> Iterator[int]:
    """Numbers of the lines that have instructions."""
    yield from (line for _, line in dis.findlinestarts(code) if line)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from executable(constant)


def executed(run: Any) -> set[tuple[str, int]]:
    """(file, line) of the watched files while `run` runs."""
    seen: set[tuple[str, int]] = set()
    names = {str(path) for path in WATCHED}

    def local(frame: FrameType, event: str, argument: object) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def enter(frame: FrameType, event: str, argument: object) -> Any:
        return local(frame, event, argument) if frame.f_code.co_filename in names else None

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return seen


def listing() -> str:
    """Markdown: for each file the lines that were not executed."""

    def run() -> None:
        import pytest

        if pytest.main(["-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("test_host.py"))]):
            sys.exit("the tests failed")

    seen, parts = executed(run), []
    for path in WATCHED:
        source = path.read_text()
        lines = source.splitlines()
        missing = sorted({line for line in executable(compile(source, str(path), "exec")) if (str(path), line) not in seen})
        if missing:
            parts += [f"`{path.relative_to(ROOT)}`", "", "```", *(f"{line:4} {lines[line - 1]}" for line in missing), "```", ""]
    return "\n".join(parts)


def main() -> None:
    made = listing()
    if "--write" in sys.argv:
        text = DOCUMENT.read_text()
        before, rest = text.split(BEGIN)
        DOCUMENT.write_text(f"{before}{BEGIN}\n\n{made}\n{END}{rest.split(END)[1]}")
    print(made)


if __name__ == "__main__":
    main()
