"""A second process that serves registered memory through NIXL."""

from __future__ import annotations

from tests.transfer import serving
from tests.transfer.serving import KEPT, MIB, POISON, ROOT, content, memory_of, poisoned, read_all, wait

TCP = ["tcp"]
__all__ = ["KEPT", "MIB", "POISON", "ROOT", "TCP", "Serving", "content", "memory_of", "poisoned", "read_all", "wait"]


class Serving(serving.Serving):
    """The second process, as a context manager. transports: None lets UCX choose."""

    def __init__(self, nbytes: int, *, name: str = "prefiller", seed: int = 0, transports: list[str] | None = None) -> None:
        self.transports = transports
        super().__init__(nbytes, kind="nixl", name=name, seed=seed, transports=transports)
