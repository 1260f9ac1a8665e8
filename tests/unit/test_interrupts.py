"""A signal ends a command wherever it comes: what C calls back cannot raise, and libraries catch what is not theirs."""

import _thread
import json
import signal
import subprocess
import sys
import time

import pytest

from bridge.cli.interrupt import Interrupts
from tests.signals import heard

PROGRAM = """
import os, signal, sys, threading, time, weakref
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

def caught_while_threads_wait():
    with threading._active_limbo_lock:  # as inside Thread.start; a ring that is collected there loses what it holds
        caught()
        time.sleep(60)

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


PLACES = ["in_a_callback", "in_del", "caught", "turned", "lost_twice", "become_an_error", "in_clean_up", "caught_while_threads_wait"]


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


EVERYWHERE = """
import json, os, signal, sys, types
import bridge.__main__ as command
from bridge.cli.interrupt import Interrupts

def main():
    if how == "error":
        raise RuntimeError("ours")
    if how == "exit":
        sys.exit(0)
    return 0

sys.modules["bridge.cli.main"] = types.SimpleNamespace(main=main, USAGE_ERROR=2)
TRACED = {one.__code__ for one in (command.kvbridge, Interrupts.__init__, Interrupts.install, Interrupts.settle, main)}

def once(number, place):
    # How kvbridge() ends where the signal comes at that place, and whether it was sent: None where there is no such place any more.
    passed, sent = 0, None

    def traced(frame, event, argument):
        nonlocal passed, sent
        if frame.f_code not in TRACED:
            return None
        frame.f_trace_opcodes = True
        passed += 1
        if passed == place:
            sent = signal.getsignal(number) != signal.SIG_DFL
            if sent:
                os.kill(os.getpid(), number)
        return traced

    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_DFL)
    sys.settrace(traced)
    try:
        code = command.kvbridge()
    except BaseException as error:
        code = type(error).__name__
    sys.settrace(None)
    return code, sent

found = {}
for how in ("return", "exit", "error"):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        place, codes = 0, []
        while True:
            place += 1
            code, sent = once(number, place)
            if sent is None:
                break
            codes.append([code, sent])
        found[f"{how} {number.name}"] = codes
print(json.dumps(found))
"""


def test_a_signal_at_every_instruction_between_start_and_end():
    """Handlers are there before the first may come, and until none may: no traceback, no wait, and one of two exit codes."""
    done = subprocess.run([sys.executable, "-c", EVERYWHERE], capture_output=True, text=True, timeout=50, preexec_fn=heard)
    assert done.returncode == 0, done.stderr
    assert set(done.stderr.splitlines()) == {"kvbridge: interrupted"}
    found = json.loads(done.stdout)
    assert len(found) == 9
    for what, codes in found.items():
        plain = {"return": 0, "exit": "SystemExit", "error": "RuntimeError"}[what.split()[0]]
        came = [code for code, sent in codes if sent]
        before = came.index(plain)
        assert before > 20, what
        assert came == [130] * before + [plain] * (len(came) - before), what
        assert {code for code, sent in codes if not sent} == {plain}, what


@pytest.mark.parametrize("ends", [False, True])
def test_nothing_is_raised_again_while_python_ends(monkeypatch, ends):
    started = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda *arguments: started.append(arguments))
    monkeypatch.setattr(sys, "is_finalizing", lambda: ends)
    interrupts = Interrupts()
    held = interrupts._watched()
    assert not started
    del held
    assert len(started) == (not ends)


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
