"""Atomic operations. Threads switch only at waits, so each of these is atomic as it stands."""

from course_lib.simulator.cuda_api.primitives import Namespace, Primitive
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.rewrite.resolve import cast


def _operand(old, value):
    """`value` converted to the type of the element it meets, as a GPU does before it operates."""
    kind = old.__class__
    return value if value.__class__ is kind else cast(kind)(value)


def _make(name, compute, inline=None, text=None):
    def atomic(array, index, value):
        if index.__class__ is not int or index < 0:
            check_index(array, index)
        old = array[index]
        array[index] = compute(old, value if value.__class__ is old.__class__
                               else _operand(old, value))
        return old

    atomic.__name__ = atomic.__qualname__ = name
    atomic.__doc__ = f"Atomically {text}; returns the old value."
    return Primitive(f"cuda.atomic.{name}", atomic, inline=inline, access="atomic")


def _inc(old, limit):
    return old.__class__(0) if old >= limit else old + old.__class__(1)


def _dec(old, limit):
    return limit if old == 0 or old > limit else old - old.__class__(1)


def _max(old, value):
    # A NaN on either side wins in numba's atomic max of floats only if it is already there.
    return value if value > old else old


def _min(old, value):
    return value if value < old else old


def _nanmax(old, value):
    return value if old != old or value > old else old


def _nanmin(old, value):
    return value if old != old or value < old else old


def _cas(array, index, old, value):
    """Atomically store `value` if the element equals `old`; returns what was there."""
    if index.__class__ is not int or index < 0:
        check_index(array, index)
    found = array[index]
    if found == _operand(found, old):
        array[index] = _operand(found, value)
    return found


def _compare_and_swap(array, old, value):
    """`cas` on the first element."""
    index = (0,) * array.ndim
    return _cas(array, index, old, value)


#: `cuda.atomic`
atomic = Namespace(
    "cuda.atomic",
    add=_make("add", lambda old, value: old + value, text="add"),
    sub=_make("sub", lambda old, value: old - value, text="subtract"),
    and_=_make("and_", lambda old, value: old & value, text="and the bits"),
    or_=_make("or_", lambda old, value: old | value, text="or the bits"),
    xor=_make("xor", lambda old, value: old ^ value, text="exclusive-or the bits"),
    inc=_make("inc", _inc, text="count up, to 0 after `value`"),
    dec=_make("dec", _dec, text="count down, to `value` after 0"),
    exch=_make("exch", lambda old, value: value, "cas", "store `value`"),
    max=_make("max", _max, text="store the larger"),
    min=_make("min", _min, text="store the smaller"),
    nanmax=_make("nanmax", _nanmax, text="store the larger; a NaN loses"),
    nanmin=_make("nanmin", _nanmin, text="store the smaller; a NaN loses"),
    cas=Primitive("cuda.atomic.cas", _cas, inline="cas", access="atomic"),
    compare_and_swap=Primitive("cuda.atomic.compare_and_swap", _compare_and_swap, inline="cas",
                               access="atomic"),
)
