"""Options of launchers, checked: sizes and steps of windows (an int or a pair), precisions."""

import operator

MOST = 2**31 - 1  # of every number that kernels take
PRECISIONS = ("float32", "tf32")  # of products of float32 numbers


def whole(value, name, least):
    """`value`, any kind of integer, as an int; ValueError for others, and below `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an int or a pair of ints, not {value!r}") from None
    if found < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
    return found


def pair(value, name, least):
    """`value`, an int or one or two of them, as a pair of ints; ValueError for what is no such."""
    if isinstance(value, str):
        raise ValueError(
            f"{name} must be numbers, not {value!r}: words are for course_lib.ops.conv2d"
        )
    if not isinstance(value, (tuple, list)):
        return (whole(value, name, least),) * 2
    if len(value) not in (1, 2):
        raise ValueError(f"{name} must be an int or a pair of ints, not {value!r}")
    both = tuple(whole(each, name, least) for each in value)
    return both if len(both) == 2 else both * 2


def hashable(value):
    """`value` as a cached function takes it."""
    return tuple(value) if isinstance(value, list) else value


def check_precision(precision):
    """ValueError for a precision that there is not."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; there are {', '.join(PRECISIONS)}")
