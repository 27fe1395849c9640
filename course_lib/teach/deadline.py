"""A time limit for code that may never end, such as a kernel whose loop doesn't advance."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator


class TimeUp(Exception):
    """The code inside `deadline` was still running after its seconds."""


def deadline(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise `TimeUp` in the code inside, wherever it is, once `seconds` have passed.

    It interrupts Python code: a single long call into compiled code is not cut short.
    """
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        return _by_signal(seconds)
    return _by_thread(seconds)


@contextlib.contextmanager
def _by_signal(seconds: float) -> Iterator[None]:
    def ring(_signal, _frame):
        raise TimeUp

    begin = time.monotonic()
    before_handler = signal.signal(signal.SIGALRM, ring)
    before_delay, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_handler)
        if before_delay:
            # Somebody else's alarm, a test's time limit say, is set again for what is left.
            left = max(0.001, before_delay - (time.monotonic() - begin))
            signal.setitimer(signal.ITIMER_REAL, left)


@contextlib.contextmanager
def _by_thread(seconds: float) -> Iterator[None]:
    """The same without signals: on Windows, or outside the main thread."""
    target = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    running = True

    def ring():
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
