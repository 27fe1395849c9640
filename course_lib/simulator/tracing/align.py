"""From what each thread did to what its warp asked for: lanes aligned into requests.

A GPU runs the lanes of a warp in step, so one instruction of the warp is one *request*: the same
place in the source, in the same iteration of every loop around it, in the same call of every
device function around it. Lanes that are elsewhere take no part. (A GPU may also run two sides of
a branch, or lanes that have left a loop, later and apart; these are different places, and so
different requests, here as there.)

Most warps never diverge: all lanes have the same list of signatures, and the n-th event of each
lane belongs together. The others are walked lane by lane.
"""

import numpy as np

from course_lib.simulator.tracing.counts import IDLE, WARP_SIZE
from course_lib.simulator.tracing.log import (
    ACTION_BITS,
    ADDRESS_BITS,
    ADDRESS_MASK,
    CALL,
    ENTER,
    LEAVE,
    LOOP,
    NUMBER_SHIFT,
    RETURN_CODE,
    SIZE_BITS,
)

_ACTION_MASK = (1 << ACTION_BITS) - 1


def split(signature):
    """(number of the site, action, code of the size)."""
    return (signature >> (NUMBER_SHIFT - ADDRESS_BITS),
            signature >> SIZE_BITS & _ACTION_MASK, signature & (1 << SIZE_BITS) - 1)


def requests(warps):
    """The requests of many warps, by signature.

    Parameters
    ----------
    warps : list of lists of lists of int
        For each warp the events of each of its lanes (32 at most).

    Returns
    -------
    dict signature -> (warp, step, addresses): arrays `(requests,)`, `(requests,)`,
    `(requests, 32)`, where `step` tells the order within the warp and IDLE marks idle lanes.
    Events that only mark where calls and `while` loops begin and end are left out.
    """
    found = {}
    by_length = {}
    for number, lanes in enumerate(warps):
        lengths = {len(events) for events in lanes}
        if lengths == {0}:
            continue
        if len(lengths) == 1:
            by_length.setdefault((len(lanes), lengths.pop()), []).append(number)
        else:
            _diverged(found, number, lanes)
    for (n_lanes, length), numbers in by_length.items():
        # A flat list becomes an array much faster than lists of lists.
        flat = [event for number in numbers for events in warps[number] for event in events]
        events = np.array(flat, np.int64).reshape(len(numbers), n_lanes, length)
        signatures = events >> ADDRESS_BITS
        same = (signatures == signatures[:, :1]).all(axis=(1, 2))
        for place in np.flatnonzero(~same):
            _diverged(found, numbers[place], warps[numbers[place]])
        groups = {}
        for place in np.flatnonzero(same):
            groups.setdefault(signatures[place, 0].tobytes(), []).append(place)
        for places in groups.values():
            _in_step(found, np.array(numbers)[places], signatures[places[0], 0],
                     events[places] & ADDRESS_MASK)
    return {signature: tuple(np.concatenate(parts) for parts in zip(*chunks, strict=True))
            for signature, chunks in found.items()}


def _in_step(found, warps, signatures, addresses):
    """Note the requests of warps `(n,)` that all did the same. `addresses` is (n, lanes, steps)."""
    if addresses.shape[1] < WARP_SIZE:
        full = np.full((len(warps), WARP_SIZE, len(signatures)), IDLE, np.int64)
        full[:, :addresses.shape[1]] = addresses
        addresses = full
    for signature in np.unique(signatures).tolist():
        if split(signature)[1] in (ENTER, LEAVE, CALL):
            continue
        steps = np.flatnonzero(signatures == signature)
        rows = addresses[:, :, steps].transpose(0, 2, 1).reshape(-1, WARP_SIZE)
        found.setdefault(signature, []).append(
            (np.repeat(warps, len(steps)), np.tile(steps, len(warps)), rows))


def _diverged(found, warp, lanes):
    """Note the requests of one warp whose lanes went different ways."""
    places = {}  # (context, signature, how often it came there before) -> row
    contexts = {}
    after = {None: None}  # the row after each row, in an order that suits every lane
    signature_of, rows = [], []
    ways = {}
    for lane, events in enumerate(lanes):
        events = np.array(events, np.int64)
        ways.setdefault((events >> ADDRESS_BITS).tobytes(), []).append((lane, events))
    for members in ways.values():
        steps, walked = [], _walk(members[0][1], contexts)
        previous = None
        for step, key in walked:
            row = places.get(key)
            if row is None:
                row = places[key] = len(rows)
                signature_of.append(key[1])
                rows.append([IDLE] * WARP_SIZE)
                after[row], after[previous] = after[previous], row
            previous = row
            steps.append((row, step))
        for lane, events in members:
            values = (events & ADDRESS_MASK).tolist()
            for row, step in steps:
                rows[row][lane] = values[step]
    order, row = {}, after[None]
    while row is not None:
        order[row] = len(order)
        row = after[row]
    by_signature = {}
    for row, signature in enumerate(signature_of):
        by_signature.setdefault(signature, []).append(row)
    for signature, chosen in by_signature.items():
        found.setdefault(signature, []).append(
            (np.full(len(chosen), warp), np.array([order[row] for row in chosen]),
             np.array([rows[row] for row in chosen], np.int64)))


def _walk(events, contexts):
    """[(place in `events`, (context, signature, repetition))] of one lane, markers left out.

    A context is a number for: this iteration of this loop, or this call, in that context.
    `contexts` holds the numbers given so far, for all lanes of a warp.
    """
    def inside(outer, *what):
        return contexts.setdefault((outer, *what), len(contexts) + 1)

    result = []
    seen = {}
    context, stack = 0, []  # the stack holds [context outside, signature of the marker, iteration]
    for step, event in enumerate(events.tolist()):
        signature = event >> ADDRESS_BITS
        number, action, code = split(signature)
        if action == LEAVE or action == CALL and code == RETURN_CODE:
            # A return out of loops leaves them too.
            while stack:
                outside, opened, *_ = stack.pop()
                context = outside
                if opened == (CALL if action == CALL else ENTER, number):
                    break
            continue
        key = context, signature
        repetition = seen[key] = seen.get(key, -1) + 1
        if action in (ENTER, CALL):
            stack.append([context, (action, number), 0, repetition])
            context = inside(context, number, repetition, 0)
            continue
        result.append((step, (context, signature, repetition)))
        if action == LOOP and event & 1 and stack:
            stack[-1][2] += 1
            context = inside(stack[-1][0], number, stack[-1][3], stack[-1][2])
    return result
