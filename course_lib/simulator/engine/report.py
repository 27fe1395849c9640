"""Say what went wrong in the user's words: which access, which thread, which line."""

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.places import FOLDER


def place(thread):
    """'thread (1, 0, 0) of block (0, 0, 0)'."""
    return f"thread {thread.index} of block {thread.b.index}"


def where(filename, lineno):
    """'kernel.py:4', or 'line 4 of the cell' for what was typed into a notebook."""
    if "ipykernel_" in filename or filename.startswith("<ipython-input"):
        return f"line {lineno} of the cell"  # the file name is made up and says nothing
    if filename.startswith("<your "):  # what a lesson has kept of another one
        return f"line {lineno} of {filename[1:-1]}"
    return f"{filename}:{lineno}"


def is_internal(frame):
    """True for a frame of this package (the code of a user's kernel keeps its own file)."""
    return frame.f_code.co_filename.startswith(FOLDER)


def _in_twin(frame):
    """True for a frame of an intrinsic's twin: its place means nothing to the user."""
    unit = frame.f_globals.get("__unit__")
    return unit is not None and unit.in_twin


def trim(error):
    """Drop the simulator's own frames from the head of a traceback."""
    traceback = error.__traceback__
    while traceback is not None and is_internal(traceback.tb_frame):
        traceback = traceback.tb_next
    return error.with_traceback(traceback)


def annotate(error, thread):
    """The error to raise for `error` in `thread`: OutOfBounds, or the same with a note."""
    if thread is None:
        return error
    if isinstance(error, IndexError):
        better = _out_of_bounds(error, thread)
        if better is not None:
            return better
    error.add_note(f"raised in {place(thread)}")
    return error


def _out_of_bounds(error, thread):
    user, tail, line = None, [], None
    traceback = error.__traceback__
    while traceback is not None:
        if "__unit__" in traceback.tb_frame.f_globals:
            user, tail = traceback, []
            if not _in_twin(traceback.tb_frame):
                line = traceback
        else:
            tail.append(traceback.tb_frame)
        traceback = traceback.tb_next
    inner = next((frame for frame in reversed(tail)
                  if is_internal(frame) and "array" in frame.f_locals
                  and "index" in frame.f_locals), None)
    text = kind = None
    if user is not None:
        unit = user.tb_frame.f_globals["__unit__"]
        site = unit.site_at(user.tb_frame.f_code, user.tb_lasti)
        line = line or user
        filename, lineno = line.tb_frame.f_code.co_filename, line.tb_lineno
    elif inner is not None:
        site = None
        caller = next((frame for frame in reversed(tail) if not is_internal(frame)), None)
        if caller is None:
            return None
        filename, lineno = caller.f_code.co_filename, caller.f_lineno
    else:
        return None
    if inner is not None:
        array, index = inner.f_locals["array"], inner.f_locals["index"]
        axis = inner.f_locals.get("axis")
    elif site is not None and not tail:
        array, index, axis = site.base_value(user.tb_frame), site.index_value(user.tb_frame), None
    else:
        return None
    if site is not None:
        text, kind = site.array_text, site.kind
        if axis is not None and len(site.elements) > 1:
            index = site.index_value(user.tb_frame, upto=axis)
    shape = site.shape if site is not None and site.shape else getattr(array, "shape", None)
    if shape is None or not is_outside(index, shape):
        return None
    whole = site.text if site else None
    acting = next((frame for frame in tail if "number" in frame.f_locals), None)
    if site is None and acting is not None:  # under an observer
        observed = thread.b.launch.sites[acting.f_locals["number"]]
        whole, text, kind = observed.text, observed.array, observed.kind
    text = text or "the array"
    verb = {"load": "read", "store": "written", "update": "updated", "atomic": "updated"}.get(
        kind, "used")
    message = (f"{whole or text} is {verb} outside the array: index {_show(index)}, "
               f"but {text} has shape {shape}; {place(thread)}, {where(filename, lineno)}")
    better = errors.OutOfBounds(message, array=text, index=index, shape=shape, thread=thread.index,
                                block=thread.b.index, filename=filename, lineno=lineno)
    better.__suppress_context__ = True
    return better.with_traceback(error.__traceback__)


def is_outside(index, shape):
    """True if some part of an index lies outside an array of that shape."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape):
        return False
    for part, size in zip(parts, shape, strict=False):
        if isinstance(part, (int, np.integer)) and not 0 <= part < size:
            return True
    return False


def _show(index):
    if isinstance(index, tuple):
        return "(" + ", ".join(_show(part) for part in index) + ")"
    if isinstance(index, slice):
        return ":".join("" if part is None else str(part)
                        for part in (index.start, index.stop, index.step)
                        if part is not None) or ":"
    return "?" if index is Ellipsis else str(index)


def position(thread):
    """(file, line, function) where `thread` waits; None if it cannot be told."""
    handle = thread.handle
    frame = getattr(handle, "gi_frame", None) or getattr(handle, "gr_frame", None)
    if frame is None:
        return None
    if hasattr(handle, "gi_yieldfrom"):
        while getattr(handle.gi_yieldfrom, "gi_frame", None) is not None and not _in_twin(
                handle.gi_yieldfrom.gi_frame):
            handle = handle.gi_yieldfrom
        frame = handle.gi_frame
    else:
        while frame is not None and (is_internal(frame) or _in_twin(frame)):
            frame = frame.f_back
    if frame is None:
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def ranges(numbers):
    """`0-3, 7`."""
    parts, numbers = [], sorted(numbers)
    start = previous = None
    for number in [*numbers, None]:
        if start is not None and number != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = None
        if start is None:
            start = number
        previous = number
    return ", ".join(parts)


_OF_ONE = {"have": "has", "wait": "waits", "go": "goes", "run": "runs"}


def describe_waiting(blocks, most=8):
    """One line per group of threads: block, numbers, what they wait for, where."""
    lines = []
    for block in list(blocks)[:most]:
        waiting = {}
        for thread in block.threads:
            if thread.resume is None:
                key = "have exited"
            else:
                what = block.waiting_for(thread)
                at = position(thread)
                key = f"{what} at {where(*at[:2])}" if at else what
            waiting.setdefault(key, []).append(thread.tid)
        for key, numbers in waiting.items():
            who = f"threads {ranges(numbers)} {key}"
            if len(numbers) == 1:
                verb, _, rest = key.partition(" ")
                who = f"thread {numbers[0]} {_OF_ONE[verb]} {rest}".rstrip()
            lines.append(f"  block {block.index}: {who}")
    if len(blocks) > most:
        lines.append(f"  and {len(blocks) - most} more blocks")
    return "\n".join(lines)
