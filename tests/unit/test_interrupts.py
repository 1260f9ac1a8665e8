"""A signal ends a command wherever it comes: what C calls back cannot raise, and libraries catch what is not theirs."""

import signal
import subprocess
import sys
import time

import pytest

from tests.signals import heard

PROGRAM = """
import os, signal, sys, time, weakref
from bridge.__main__ import kvbridge
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
        time.sleep(60)
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
    time.sleep(60)
    print("went on", flush=True)
    return 0

main.demo.run = run
sys.argv = ["kvbridge", "demo"]
sys.exit(kvbridge())
"""


PLACES = ["in_a_callback", "in_del", "caught", "turned", "lost_twice", "become_an_error", "in_clean_up"]


@pytest.mark.parametrize(("where", "number"), [(where, ("SIGINT", "SIGTERM")[i % 2]) for i, where in enumerate(PLACES)])
def test_a_signal_ends_the_command_wherever_it_comes(where, number):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(where=where, number=number)], capture_output=True, text=True, timeout=50, preexec_fn=heard
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == ("clean\n" if where == "in_clean_up" else "")
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr
    assert done.stderr.splitlines()[-1] == "kvbridge: interrupted"


def test_what_is_no_signal_is_still_told():
    program = PROGRAM.format(where="fails", number="SIGINT").replace(
        "def run(_)", "def fails():\n    raise RuntimeError('ours')\n\ndef run(_)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, preexec_fn=heard)
    assert done.returncode == 1
    assert "RuntimeError: ours" in done.stderr


def test_a_signal_after_the_end_changes_nothing():
    program = (
        PROGRAM.format(where="str", number="SIGINT")
        .replace("time.sleep(60)", "pass")
        .replace("sys.exit(kvbridge())", "code = kvbridge(); signalled(); sys.exit(code)")
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, preexec_fn=heard)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_signal_while_the_command_is_being_imported():
    """That takes most of a second, and on a busy machine five."""
    program = """
import os, signal, sys
from bridge.__main__ import kvbridge

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "bridge.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["kvbridge", "doctor"]
sys.exit(kvbridge())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, preexec_fn=heard)
    assert (done.returncode, done.stderr) == (130, "kvbridge: interrupted\n")


def test_what_was_ignored_stays_ignored():
    """nohup, and a script's `command &`."""
    program = PROGRAM.format(where="signalled", number="SIGHUP").replace("time.sleep(60)", "pass")
    program = program.replace("def run(_)", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n\ndef run(_)")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, preexec_fn=heard)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_a_terminal_that_goes_ends_the_command():
    """Private keys of `doctor` and `demo` must not stay behind."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(where="in_clean_up", number="SIGHUP")],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=heard,
    )
    assert (done.returncode, done.stdout) == (130, "clean\n")


@pytest.mark.parametrize("how", ["closed", "nobody reads"])
def test_the_exit_code_does_not_depend_on_who_reads(how):
    command = [sys.executable, "-c", PROGRAM.format(where="signalled", number="SIGINT")]
    if how == "closed":
        assert (
            subprocess.run(
                ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, timeout=60, preexec_fn=heard
            ).returncode
            == 130
        )
        return
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=heard)
    process.stderr.close()
    assert process.wait(60) == 130


def test_signals_at_the_end_change_nothing():
    """Python puts back default handlers while it ends."""
    program = PROGRAM.format(where="print", number="SIGINT").replace("time.sleep(60)", 'print("here", flush=True); time.sleep(60)')
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    while process.stdout.readline() != "here\n":
        assert process.poll() is None
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.002)
    assert process.returncode == 130
    assert process.stderr.read() == "kvbridge: interrupted\n"
    process.stdout.close()
    process.stderr.close()
