"""A signal ends a command wherever it comes: what C calls back cannot raise, and libraries catch what is not theirs."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time, weakref
from bridge.cli import main

class Thing:
    pass

def signalled(*_):
    os.kill(os.getpid(), signal.{number})
    for _ in range(1000):
        pass

class Ends:
    def __del__(self):
        signalled()

def in_a_callback():
    thing = Thing()
    kept = weakref.ref(thing, signalled)
    del thing

def in_del():
    Ends()

def caught():
    try:
        signalled()
    except:
        pass

def turned():
    try:
        try:
            signalled()
        except BaseException as error:
            raise ImportError("a library's own reason") from error
    except ImportError:
        pass

def lost_twice():
    caught()
    try:
        time.sleep(20)
    except:
        pass

def become_an_error():
    try:
        signalled()
    except BaseException as error:
        raise OSError("a library's own reason") from error

def in_clean_up():
    try:
        signalled()
    finally:
        signalled()
        print("clean", flush=True)

def run(_):
    {where}()
    time.sleep(20)
    print("went on", flush=True)
    return 0

main.demo.run = run
sys.argv = ["kvbridge", "demo"]
sys.exit(main.kvbridge())
"""


PLACES = ["in_a_callback", "in_del", "caught", "turned", "lost_twice", "become_an_error", "in_clean_up"]


@pytest.mark.parametrize(("where", "number"), [(where, ("SIGINT", "SIGTERM")[i % 2]) for i, where in enumerate(PLACES)])
def test_a_signal_ends_the_command_wherever_it_comes(where, number):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(where=where, number=number)], capture_output=True, text=True, timeout=15)
    assert done.returncode == 130, done.stderr
    assert done.stdout == ("clean\n" if where == "in_clean_up" else "")
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert done.stderr.splitlines()[-1] == "kvbridge: interrupted"


def test_what_is_no_signal_is_still_told():
    program = PROGRAM.format(where="fails", number="SIGINT").replace(
        "def run(_)", "def fails():\n    raise RuntimeError('ours')\n\ndef run(_)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert done.returncode == 1
    assert "RuntimeError: ours" in done.stderr


def test_a_signal_after_the_end_changes_nothing():
    program = (
        PROGRAM.format(where="str", number="SIGINT")
        .replace("time.sleep(20)", "pass")
        .replace("sys.exit(main.kvbridge())", "code = main.kvbridge(); signalled(); sys.exit(code)")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=15)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
