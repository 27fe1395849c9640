"""Operations in which the lanes of a warp take part together: shuffles, votes, matches.

Each becomes an operation for the scheduler, which calls `compute(group)` once every live lane of
the mask has arrived; `group` maps a lane to (thread, payload), and the answer goes to
`thread.value`.
"""

import functools

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine.scheduler import FULL_MASK, SPIN, WARP_SIZE, warp_operation


def _operation(thread, name, compute, mask, payload):
    mask = int(mask) & FULL_MASK
    if not mask >> thread.lane & 1:
        raise errors.MaskError(
            f"{name}: lane {thread.lane} calls it with mask {mask:#010x}, which leaves that lane "
            f"out; thread {thread.index} of block {thread.b.index}")
    return warp_operation, compute, mask, payload


def _undefined(value):
    """What a shuffle gives that reads from a lane which takes no part."""
    if isinstance(value, (np.inexact, float)) or value.__class__.__name__ == "bfloat16":
        return value.__class__(float("nan"))
    if isinstance(value, np.integer):
        return np.frombuffer(b"\xcd" * value.dtype.itemsize, value.dtype)[0]
    return -0x32323233


def _shuffle(source):
    def compute(group):
        for lane, (thread, (value, operand)) in group.items():
            origin = source(lane, operand)
            if origin == lane:
                thread.value = value
            else:
                other = group.get(origin)
                thread.value = _undefined(value) if other is None else other[1][0]

    compute.source = source
    return compute


def _from_lane(lane, operand):
    return operand & 31


def _from_below(lane, delta):
    return lane - delta if lane >= delta else lane


def _from_above(lane, delta):
    return lane + delta if lane + delta < WARP_SIZE else lane


def _from_partner(lane, bits):
    return lane ^ bits if lane ^ bits < WARP_SIZE else lane


def _shuffle_primitive(name, source, text):
    compute = _shuffle(source)

    def shuffle(thread, mask, value, operand):
        return _operation(thread, f"cuda.{name}", compute, mask, (value, int(operand)))

    shuffle.__doc__, shuffle.__qualname__ = text, f"cuda.{name}"  # as errors name it
    return Primitive(f"cuda.{name}", shuffle, "blocking")


def _vote(answer):
    def compute(group):
        ballot = 0
        for lane, (_, predicate) in group.items():
            if predicate:
                ballot |= 1 << lane
        members = 0
        for lane in group:
            members |= 1 << lane
        result = answer(ballot, members)
        for thread, _ in group.values():
            thread.value = result

    return compute


def _vote_primitive(name, answer, text):
    compute = _vote(answer)

    def vote(thread, mask, predicate):
        return _operation(thread, f"cuda.{name}", compute, mask, bool(predicate))

    vote.__doc__, vote.__qualname__ = text, f"cuda.{name}"
    return Primitive(f"cuda.{name}", vote, "blocking")


def _match_any(group):
    masks = {}
    for lane, (_, value) in group.items():
        masks[value] = masks.get(value, 0) | 1 << lane
    for thread, value in group.values():
        thread.value = masks[value]


def _match_all(group):
    values = [value for _, value in group.values()]
    same = all(value == values[0] for value in values)
    mask = functools.reduce(lambda bits, lane: bits | 1 << lane, group, 0)
    for thread, _ in group.values():
        thread.value = (mask, True) if same else (0, False)


def _bits(value):
    """A value by its bits: the hardware compares those, so NaN matches NaN."""
    return value.tobytes() if isinstance(value, np.generic) else value


def _nothing(group):
    for thread, _ in group.values():
        thread.value = None


def _syncwarp(thread, mask=FULL_MASK):
    """Wait for the lanes of `mask`."""
    return _operation(thread, "cuda.syncwarp", _nothing, mask, None)


def _match_any_sync(thread, mask, value):
    """The mask of lanes that hold the same value."""
    return _operation(thread, "cuda.match_any_sync", _match_any, mask, _bits(value))


def _match_all_sync(thread, mask, value):
    """(mask, True) if all lanes hold the same value, else (0, False)."""
    return _operation(thread, "cuda.match_all_sync", _match_all, mask, _bits(value))


def _gather(block, thread, op):
    from course_lib.simulator.engine.report import position

    thread.warp.gathering.append((thread, position(thread)))


def _activemask(thread):
    """The lanes of this warp that run this very call; here: those that reach it together."""
    return (_gather,)


def _lanemask_lt(thread):
    """A mask of the lanes below this one."""
    return (1 << thread.lane) - 1


def _nanosleep(thread, nanoseconds):
    """Let other threads run; no time passes."""
    return SPIN


#: name -> primitive, under `cuda`
primitives = {
    "shfl_sync": _shuffle_primitive("shfl_sync", _from_lane, "The value of lane `operand`."),
    "shfl_up_sync": _shuffle_primitive("shfl_up_sync", _from_below,
                                       "The value of the lane `operand` below."),
    "shfl_down_sync": _shuffle_primitive("shfl_down_sync", _from_above,
                                         "The value of the lane `operand` above."),
    "shfl_xor_sync": _shuffle_primitive("shfl_xor_sync", _from_partner,
                                        "The value of the lane whose number differs in `operand`."),
    "all_sync": _vote_primitive("all_sync", lambda ballot, members: ballot == members,
                                "True if the predicate holds in all lanes."),
    "any_sync": _vote_primitive("any_sync", lambda ballot, members: ballot != 0,
                                "True if the predicate holds in some lane."),
    "eq_sync": _vote_primitive("eq_sync", lambda ballot, members: ballot in (0, members),
                               "True if the predicate is the same in all lanes."),
    "ballot_sync": _vote_primitive("ballot_sync", lambda ballot, members: ballot,
                                   "A mask of the lanes where the predicate holds."),
    "match_any_sync": Primitive("cuda.match_any_sync", _match_any_sync, "blocking"),
    "match_all_sync": Primitive("cuda.match_all_sync", _match_all_sync, "blocking"),
    "syncwarp": Primitive("cuda.syncwarp", _syncwarp, "blocking"),
    "activemask": Primitive("cuda.activemask", _activemask, "blocking"),
    "lanemask_lt": Primitive("cuda.lanemask_lt", _lanemask_lt, "thread"),
    "nanosleep": Primitive("cuda.nanosleep", _nanosleep, "blocking"),
}
