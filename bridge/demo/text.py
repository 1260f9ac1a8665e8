"""English prose for the demonstration and the measurements: plain text files beside this module.

Files whose name begins with `own-` are the project's own text, written for this purpose; the others are the beginnings of public-domain
works, written down from memory: no edition is quoted, and a word may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Passage:
    """At least 400 tokens of SmolLM2's tokeniser. name: the file's, without its suffix."""

    name: str
    text: str

    @property
    def own(self) -> bool:
        """Whether it is the project's own text."""
        return self.name.startswith("own-")


def _read(name: str) -> str:
    """The file's text, each paragraph on one line."""
    raw = (files("bridge.demo") / "data" / name).read_text("utf-8")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in raw.strip().split("\n\n"))


def passages() -> list[Passage]:
    """All passages, by name."""
    folder = files("bridge.demo") / "data" / "passages"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".txt"))
    return [Passage(name.removesuffix(".txt"), _read(f"passages/{name}")) for name in names]


def default_prompt() -> str:
    """About 300 tokens that the demonstration prefills unless it is given a file."""
    return _read("prompt.txt")
