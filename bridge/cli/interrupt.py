"""SIGINT, SIGTERM and SIGHUP end a command by unwinding its stack, so that its temporary keys and its second process go too.

An exception that a signal's handler raises can be lost: what C calls back (a weak reference's callback, `__del__`) cannot raise, and
a library may catch everything. An Interrupted that nobody holds any more was lost; it is raised again a moment later.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
import weakref
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

INTERRUPTED = 130
AGAIN_SECONDS = 0.05
UNWINDING_SECONDS = 5.0
"""While an Interrupted is on its way, a further signal must not break the clean-up; a clean-up that takes longer may be cut short."""


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """One of SIGNALS. Not KeyboardInterrupt: CPython may kill itself at its end although that was caught (code run by PyRun_*)."""


class Interrupts:
    """Turns SIGNALS into Interrupted in the main thread, from `install` until `settle`; from then on they are ignored.

    One that is ignored already stays so: nohup and a script's `command &` mean it.
    """

    def __init__(self) -> None:
        self._asked = self._settled = False
        self._raised: weakref.ref[Interrupted] | None = None
        self._since = 0.0
        self._unraisable = sys.unraisablehook
        self._numbers: list[signal.Signals] = []

    def install(self) -> None:
        """Signals raise from here on, and may already while this runs: what catches Interrupted must be around the call."""
        sys.unraisablehook = self._tell
        self._numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._numbers:
            signal.signal(number, self._deliver)

    def settle(self) -> bool:
        """No signal raises any more. Whether one came before. One that comes as this is called may raise out of it: then call it again."""
        self._settled = True
        for number in self._numbers:
            # Python puts back the default of a handler of its own while it ends, and would die by the next signal.
            signal.signal(number, signal.SIG_IGN)
        return self._asked

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        if self._settled:
            return
        self._asked = True
        now = time.monotonic()
        if self._raised is not None and self._raised() is not None and now - self._since < UNWINDING_SECONDS:
            return
        self._since = now
        # Not in a variable here: its traceback holds this frame, and a ring of the two would outlive the loss.
        raise self._watched()

    def _watched(self) -> Interrupted:
        interrupted = Interrupted()
        self._raised = weakref.ref(interrupted, self._lost)
        return interrupted

    def _lost(self, reference: weakref.ref[Interrupted]) -> None:
        if self._settled or sys.is_finalizing():
            return
        # Not a threading.Thread, whose start takes a lock, which the code that was interrupted may hold, and waits for the thread, which
        # never runs once the interpreter ends.
        _thread.start_new_thread(self._again, ())

    def _again(self) -> None:
        time.sleep(AGAIN_SECONDS)
        main = threading.main_thread().ident
        if main is not None and not self._settled:
            signal.pthread_kill(main, self._numbers[0])

    def _tell(self, what: UnraisableHookArgs, /) -> None:
        """A lost Interrupted is no fault to be told of."""
        if not issubclass(what.exc_type, Interrupted):
            self._unraisable(what)
