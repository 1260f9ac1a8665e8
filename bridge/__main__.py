"""The command `kvbridge`, which `python -m bridge` is too. Signals are seen to before anything else is imported: that takes a second."""

from __future__ import annotations

import contextlib
import sys

from bridge.cli.interrupt import INTERRUPTED, Interrupts


def kvbridge() -> int:
    """What the shell starts. Returns the exit code."""
    interrupts = Interrupts()
    failed = 2
    try:
        try:
            interrupts.install()
            from bridge.cli.main import USAGE_ERROR, main

            failed = USAGE_ERROR
            code = main()
        finally:
            interrupts.settle()  # in here, since a signal may still come before it has begun
    except BaseException:
        if not interrupts.settle():
            raise
        code = failed
    # An error that is said is perhaps what a library made of the signal.
    if interrupts.settle() and code == failed:
        if sys.stderr is not None:
            with contextlib.suppress(OSError):  # its reader may have gone by the same signal
                print("kvbridge: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(kvbridge())
