"""Signals as a terminal's shell leaves them: a suite that runs in the background of a script would hand on ignored ones."""

from __future__ import annotations

import signal


def heard() -> None:
    """For a child before it executes its program (preexec_fn): the signals that end a command are ignored no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
