"""A time limit for code that may never end, such as a kernel whose loop doesn't advance.

What counts is the processor's time of the code's own thread where that can be had, so that neither
a busy machine nor another thread stops what would end. The time in which the code sleeps counts for
less: it may wait for another thread or for a disk. Elsewhere time on the clock counts.

A browser has neither signals nor threads: nothing stops the code there but the user.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import signal
import sys
import threading
import time
from collections.abc import Iterator

# An exception that is raised inside a finalizer is lost, so it rings again.
AGAIN_SECONDS = 0.05

#: Seconds by which the timer may be early.
TICK = 0.01

#: How many times as long code may sleep, or take on the clock where nobody knows whether it sleeps.
PATIENCE = 10


class _Held:
    """How many sections run now that no ring may cut short: it rings again afterwards.

    They count in and out by statements without a call, between which Python handles no signal.
    """

    n = 0


held = _Held()


class TimeUp(BaseException):
    """The code inside `deadline` was still running after its seconds.

    No `Exception`, which that code may catch.
    """


def deadline(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise `TimeUp` in the code inside, wherever it is, once `seconds` have passed.

    It interrupts Python code: a single long call into compiled code is not cut short.
    """
    if sys.platform == "emscripten":
        return contextlib.nullcontext()
    if hasattr(signal, "ITIMER_VIRTUAL") and threading.current_thread() is threading.main_thread():
        return _by_signal(seconds)
    return _by_thread(seconds)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from spending a short time on all that a notebook holds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    running = True

    def ring(_signal, frame):
        # The timer counts the time of all threads. What cleans up after the first ring, and after
        # the code inside, is left to its end.
        taken = time.thread_time() - begin + clock.slept() / PATIENCE
        if held.n or isinstance(sys.exception(), TimeUp) or _would_be_lost(frame):
            return
        if running and taken > first - TICK:
            raise TimeUp

    # Another timer than SIGALRM's, which tests and servers like to have for themselves.
    before_handler = signal.signal(signal.SIGVTALRM, ring)
    before_delay, _ = signal.getitimer(signal.ITIMER_VIRTUAL)
    first = min(seconds, before_delay or seconds)
    begin, clock = time.thread_time(), _Clock(threading.get_native_id())
    over, lock = threading.Event(), threading.Lock()

    def watch():
        # What sleeps takes no time of the processor, on which the timer counts.
        while not over.wait(min(0.1, first / 2)):
            with lock:
                if running and clock.slept() > first:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGVTALRM)

    watcher = threading.Thread(target=watch, daemon=True)
    try:  # it may ring at once
        watcher.start()
        signal.setitimer(signal.ITIMER_VIRTUAL, first, AGAIN_SECONDS)
        yield
    finally:
        running = False
        over.set()
        with lock:  # no ring comes after this
            pass
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before_handler)
        if before_delay:
            # A deadline around this one is set again for what is left of it.
            left = max(0.001, before_delay - (time.thread_time() - begin))
            signal.setitimer(signal.ITIMER_VIRTUAL, left, AGAIN_SECONDS)


def _would_be_lost(frame) -> bool:
    """Whether `frame` is within a callback of the garbage collector or `sys.unraisablehook`.

    Python hands what the one raises to the other, and goes on.
    """
    hook = getattr(sys.unraisablehook, "func", sys.unraisablehook)  # pytest's is a partial
    codes = [getattr(function, "__code__", None) for function in (hook, *gc.callbacks)]
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


class _Clock:
    """Tells how long a thread has slept: neither run, nor waited for a processor."""

    def __init__(self, thread: int):
        self._file = f"/proc/self/task/{thread}/schedstat"
        self._begin, self._awake = time.monotonic(), self._read()

    def slept(self) -> float:
        """Return the seconds; where they are not known, all that have passed."""
        passed, awake = time.monotonic() - self._begin, self._read()
        return passed if awake is None else passed - (awake - self._awake)

    def _read(self) -> float | None:
        try:
            with open(self._file) as file:
                ran, waited, _ = map(int, file.read().split())
        except (OSError, ValueError):  # Linux alone has it
            return None
        return (ran + waited) / 1e9


@contextlib.contextmanager
def _by_thread(seconds: float) -> Iterator[None]:
    """The same without signals: on Windows, or outside the main thread."""
    target = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    running = True

    def ring():
        while held.n and running:
            time.sleep(TICK)
        with lock:
            if running:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(TimeUp))

    timer = threading.Timer(seconds, ring)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            running = False
        timer.cancel()
