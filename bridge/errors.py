"""The root of every typed failure. A failure has a clause (its name in counters, refusals and the specification) and a remedy."""

from __future__ import annotations

from typing import ClassVar, Self


class KVBridgeError(Exception):
    """Something that kvbridge refused or could not do.

    `clause` names the rule that was broken, in counters and on the control channel; `remedy` says what the operator can do.
    `str(error)` is one sentence of detail followed by the remedy. What cannot be printed in it is escaped: a peer may have chosen the
    words, and they go to logs and terminals.
    """

    clause: ClassVar[str] = "error"
    remedy: ClassVar[str] = ""

    def __init__(self, detail: str, *, remedy: str | None = None) -> None:
        self.detail = printable(detail.rstrip("."))
        self.advice = printable((remedy if remedy is not None else self.remedy).rstrip("."))
        super().__init__(self.detail + ("; " + self.advice if self.advice else ""))

    def anew(self) -> Self:
        """The same failure, to be kept or raised again: without the traceback, and so without the frames and pages that it refers to."""
        made = type(self).__new__(type(self), *self.args)
        made.__dict__.update(self.__dict__)
        return made


def printable(text: str) -> str:
    """The text with everything escaped that could move a terminal's cursor, reverse its text or begin a line of its own."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def all_error_types(root: type[KVBridgeError] = KVBridgeError) -> dict[str, type[KVBridgeError]]:
    """Every error type that is defined so far, by clause."""
    found = {root.clause: root}
    for child in root.__subclasses__():
        found.update(all_error_types(child))
    return found
