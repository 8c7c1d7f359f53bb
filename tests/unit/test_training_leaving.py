"""Why and when a run leaves, in one process: signals, the clock, and what is put back."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

from megatron.training.leaving import Leaving, Reason


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(leaving: Leaving) -> Reason | None:
    leaving.ask()
    return leaving.answer()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_time_is_over_on_the_clock_of_the_first_rank() -> None:
    clock = Clock()
    leaving = Leaving(0, 1, 2.5, began=100.0, clock=clock)
    for now, reason in ((100.0, None), (249.9, None), (250.0, Reason.TIME), (999.0, Reason.TIME)):
        clock.now = now
        assert answer(leaving) is reason
    assert answer(Leaving(1, 1, 2.5, began=100.0, clock=clock)) is None
    assert answer(Leaving(0, 1, None, began=100.0, clock=clock)) is None


def test_a_signal_is_a_wish_and_goes_before_the_time() -> None:
    clock = Clock()
    leaving = Leaving(0, 1, 1.0, began=0.0, clock=clock)
    before = signal.getsignal(signal.SIGTERM)
    with leaving.listening():
        assert answer(leaving) is Reason.TIME
        leaving.ask()
        terminate()
        assert leaving.answer() is Reason.TIME  # it came after the question
        assert answer(leaving) is Reason.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_was_there_before_hears_a_second_signal_and_comes_back_after_an_exception() -> None:
    heard: list[int] = []

    def mine(number: int, _: object) -> None:
        heard.append(number)

    clock, before = Clock(), signal.signal(signal.SIGTERM, mine)
    try:
        with contextlib.suppress(KeyError), Leaving(0, 1, clock=clock).listening():
            terminate()
            clock.now += 4.0  # whoever sent it has sent it to the launcher too, which passes it on
            terminate()
            assert heard == []
            clock.now += 2.0
            terminate()
            assert heard == [signal.SIGTERM]
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


PROGRAM = """
import os, signal
from megatron.training.leaving import Leaving
now = [0.0]
leaving = Leaving(0, 1, clock=lambda: now[0])
with leaving.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    print("first", flush=True)
    now[0] = 10.0
    os.kill(os.getpid(), signal.SIGTERM)
    print("second", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "first\n"), done.stderr


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def run() -> None:
        leaving = Leaving(0, 1)
        with leaving.listening():
            seen.extend([signal.getsignal(signal.SIGTERM), answer(leaving)])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before, None]
