"""Options of launchers, checked: sizes and steps of windows (an int or a pair), precisions."""

import operator

MOST = 2**31 - 1  # of every number that kernels take
PRECISIONS = ("float32", "tf32")  # of products of float32 numbers


def as_int(value):
    """`value`, any kind of integer, as an int; None for anything else, True and False too."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def as_pair(value):
    """(a, b) of a tuple or list of two, or twice the one; None for another number of them."""
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) == 1:
        return tuple(value) * 2
    return tuple(value) if len(value) == 2 else None


def whole(value, name, least):
    """`value`, any kind of integer, as an int; ValueError for others, and below `least`."""
    if (found := as_int(value)) is None:
        raise ValueError(f"{name} must be an int or a pair of ints, not {value!r}")
    if found < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return found


def pair(value, name, least):
    """`value`, an int or one or two of them, as a pair of ints; ValueError for what is no such."""
    if isinstance(value, str):
        raise ValueError(
            f"{name} must be numbers, not {value!r}: words are for course_lib.ops.conv2d"
        )
    if (both := as_pair(value)) is None:
        raise ValueError(f"{name} must be an int or a pair of ints, not {value!r}")
    return tuple(whole(each, name, least) for each in both)


def hashable(value):
    """`value` as a cached function takes it."""
    return tuple(value) if isinstance(value, list) else value


def check_precision(precision):
    """ValueError for a precision that there is not."""
    if precision not in PRECISIONS:
        raise unknown_precision(precision)


def unknown_precision(precision):
    """The ValueError of a precision that there is not."""
    return ValueError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")
