"""What the exercise `choose_backend` of lesson 12 runs: a choice on a machine that is made up."""

import numpy as np

from course_lib.teach.checking.deadline import TimeUp

#: What a choice of `use_cuda` can lead to.
OUTCOMES = ("the CPU", "the GPU", "what is missing", "why it does not start", "use_cuda itself")

_VALUES = {"True": True, "False": False, "None": None}
_NUMBERS = {"0": 0, "1": 1}

#: What an error may say that `use_cuda` may be: a word for each of True, False and None.
_ALLOWED = (("true", "bool"), ("false", "bool"), ("none", "null"))


class NoStart(Exception):
    """What a library of its own raises where the GPU does not start: no kind that Python knows."""


#: What `start_gpu` may raise: whoever catches one kind hides it.
ERRORS = {each.__name__: each for each in (OSError, RuntimeError, ImportError, NoStart)}


def outcome(use_cuda, machine):
    """What should come of `use_cuda`, as Python writes it, on a machine: one of OUTCOMES."""
    if use_cuda not in _VALUES:
        return "use_cuda itself"
    if use_cuda == "False":
        return "the CPU"
    if machine == "has none":
        return "what is missing" if use_cuda == "True" else "the CPU"
    return "why it does not start" if "does not start" in machine else "the GPU"


class _Machine:
    """The three functions that the learner's one is given; notes which of them were called."""

    def __init__(self, machine, missing):
        self.machine, self.reason = machine, missing
        self.cpu, self.gpu = object(), object()
        kind = ERRORS.get(machine.rpartition(": ")[2], OSError)
        self.broken = kind("the GPU is there, but has run out of memory")
        self.called = []

    def missing(self):
        self.called.append("missing")
        return self.reason or None

    def start_gpu(self):
        self.called.append("start_gpu")
        if self.machine == "has none":
            raise AssertionError("start_gpu() was called where there is no GPU")
        if "does not start" in self.machine:
            raise self.broken
        return self.gpu

    def start_cpu(self):
        self.called.append("start_cpu")
        return self.cpu


def choose(function, run):
    """Let it choose, and return the place in OUTCOMES of what came of it."""
    text, machine = str(run.use_cuda), str(run.machine)
    use_cuda = (_VALUES | _NUMBERS).get(text, text.strip("'"))
    given = _Machine(machine, str(run.missing))
    wanted, error, found = outcome(text, machine), None, None
    try:
        found = function(use_cuda, given.missing, given.start_gpu, given.start_cpu)
    except TimeUp:
        raise
    except Exception as raised:
        error = raised
    came = _came(given, wanted, found, error)
    if came != wanted:
        _object(given, text, wanted, came, found, error)
    if text == "False" and (touched := [name for name in given.called if name != "start_cpu"]):
        raise ValueError(
            f"with use_cuda=False it called {touched[0]}(): nobody wants the GPU, and even to ask "
            "for it takes its time and some of its memory"
        )
    return np.float64(OUTCOMES.index(came))


def _came(given, wanted, found, error):
    """What happened, one of OUTCOMES; None where it is none of them."""
    if error is None:
        return {id(given.cpu): "the CPU", id(given.gpu): "the GPU"}.get(id(found))
    if given.broken in _chain(error):
        return "why it does not start"
    if wanted == "what is missing" and given.reason in str(error):
        return wanted
    if wanted == "use_cuda itself" and _says_what_it_may_be(error):
        return wanted
    return None


def _says_what_it_may_be(error):
    """Tell whether an error, of whichever class, names what `use_cuda` may be."""
    words = str(error).lower()
    return all(any(word in words for word in each) for each in _ALLOWED)


def _chain(error):
    """The error and those that it was raised from."""
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _object(given, text, wanted, came, found, error):
    """Raise what is wrong, in words."""
    if error is not None and wanted in ("the CPU", "the GPU"):
        raise error  # with the learner's own line
    if error is not None:
        what = f"{type(error).__name__}: {error}"
        if wanted == "what is missing":
            raise ValueError(
                f"use_cuda=True was refused with {what!r}, which does not say what is missing: "
                f"{given.reason!r}"
            )
        if wanted == "use_cuda itself":
            raise ValueError(
                f"use_cuda={text} was refused with {what!r}, which does not say what it may be: "
                "True, False or None"
            )
        raise ValueError(
            f"the GPU did not start ({given.broken}), and this was lost: it raised {what!r}"
        )
    if callable(found) and getattr(found, "__self__", None) is given:
        raise ValueError(f"it returned the function {found.__name__} itself: it must be called")
    returned = f"returned {came}" if came else f"returned {found!r}, which is no backend"
    if came == "the CPU" and wanted in ("what is missing", "why it does not start"):
        reason = given.reason or given.broken
        raise ValueError(
            f"with use_cuda={text} it took the CPU without a word, although {reason}: the program "
            "would run, many times slower, and nobody would know"
        )
    if wanted == "use_cuda itself":
        raise ValueError(
            f"use_cuda={text} is neither True nor False nor None, and it {returned}: "
            + (f"{text} equals {bool(int(text))} in Python, and is not the same thing"
               if text in _NUMBERS else "a text is true in Python, whatever it says")
        )
    raise ValueError(f"with use_cuda={text} it {returned}, and should have taken {wanted}")
