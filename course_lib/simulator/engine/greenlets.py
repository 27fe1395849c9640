"""Greenlets, in which a kernel runs whose source cannot be rewritten. Loaded with the first one."""

import functools

_getcurrent = object  # what it gives has no `thread`


def current():
    """The CUDA thread (`engine.scheduler.Thread`) of the running greenlet; None outside of one."""
    return getattr(_getcurrent(), "thread", None)


@functools.cache
def kind():
    """The class of a greenlet that runs one CUDA thread, its `thread`."""
    global _getcurrent
    import greenlet

    class ThreadGreenlet(greenlet.greenlet):
        thread = None

    _getcurrent = greenlet.getcurrent
    return ThreadGreenlet
