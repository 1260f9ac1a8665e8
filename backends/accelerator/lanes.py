"""Lanes: the streams, events and buffers that one call of pack or land uses while it lasts."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from backends.accelerator.arguments import Arguments

_SMALL = 1 << 15


def new_stream(device: torch.device) -> Any:
    """A stream of the device; torch's streams of the host take no device."""
    module = torch.get_device_module(device)
    return module.Stream() if device.type == "cpu" else module.Stream(device=device)


class Lane:
    """Two streams, so that copies overlap kernels, and buffers that grow to what was asked for.

    While a call has a lane, `compute` is the thread's current stream. The engine's stream is never made to wait.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self.device, self.module, self.depth = device, torch.get_device_module(device), depth
        self.pinned = device.type != "cpu"
        self.compute, self.copies = new_stream(device), new_stream(device)
        self._words = self._host_words = torch.empty(0, dtype=torch.int64)
        self._results = torch.zeros(8, dtype=torch.int64, pin_memory=self.pinned)
        self._slots: list[torch.Tensor | None] = [None] * depth
        self._free: list[Any] = [None] * depth

    def begin(self, point: Any) -> None:
        """Nothing of this call runs before what the engine had queued at `point`, an event."""
        self.compute.wait_event(point)
        self.copies.wait_event(point)

    def event(self, stream: Any) -> Any:
        made = self.module.Event()
        made.record(stream)
        return made

    def upload(self, arguments: Arguments) -> torch.Tensor:
        """The arguments on the device, int64 [arguments.words]; copied in one piece."""
        count = arguments.words
        if self._words.numel() < count:
            size = max(count, 2 * self._words.numel(), _SMALL)
            self._host_words = torch.empty(size, dtype=torch.int64, pin_memory=self.pinned)
            self._words = torch.empty(size, dtype=torch.int64, device=self.device)
        words, held = self._words[:count], self._host_words[: count - arguments.reserved]
        arguments.write(held)
        words[arguments.reserved :].copy_(held, non_blocking=True)
        return words

    def read(self, result: torch.Tensor) -> np.ndarray:
        """int64 [8] on the host, when everything that was queued before is done."""
        self._results.copy_(result, non_blocking=True)
        self.event(self.compute).synchronize()
        return self._results.numpy()

    def slot(self, number: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of scratch on the device, one of a few that take turns; written only after `await_free`."""
        place = number % len(self._slots)
        held = self._slots[place]
        if held is None or held.numel() < nbytes:
            if held is not None and self._free[place] is not None:
                self._free[place].synchronize()
            held = self._slots[place] = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
            self.copies.wait_event(self.event(self.compute))
        return held[:nbytes]

    def free(self, number: int, stream: Any) -> None:
        """Slot `number` may be written again after what `stream` has queued."""
        self._free[number % len(self._slots)] = self.event(stream)

    def await_free(self, number: int, stream: Any) -> None:
        """`stream` goes on when slot `number` may be written."""
        event = self._free[number % len(self._slots)]
        if event is not None:
            stream.wait_event(event)

    def drain(self) -> None:
        """Waits until nothing of this lane is under way."""
        for stream in (self.compute, self.copies):
            self.event(stream).synchronize()
        self._free = [None] * len(self._free)


class Lanes:
    """At most `count` calls at a time; further ones wait for a lane."""

    def __init__(self, device: torch.device, count: int, depth: int) -> None:
        self._device, self._depth = device, depth
        self._idle: queue.LifoQueue[Lane | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)
        self._making = threading.Lock()

    def any_idle(self) -> bool:
        """Whether a call need not wait for a lane, as it looks now."""
        return not self._idle.empty()

    @contextlib.contextmanager
    def taken(self) -> Iterator[Lane]:
        """A lane of one's own. When it is given back, nothing of it is under way."""
        lane = self._idle.get()
        try:
            if lane is None:
                with self._making:
                    lane = Lane(self._device, self._depth)
            try:
                yield lane
            finally:
                lane.drain()
        finally:
            self._idle.put(lane)
