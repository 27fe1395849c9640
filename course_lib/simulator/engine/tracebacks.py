"""How IPython shows an error: the user's own lines, not those of the package it passed through."""

import collections
import dis
import functools
import os
import sys
import sysconfig
import types

_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
_RAISE = dis.opmap["RAISE_VARARGS"]

#: How often a traceback shows one line of a function that calls itself.
REPEATED = 3


def shows_user_lines(folder):
    """Decorator: errors that leave the function are shown by IPython without frames in `folder`.

    Only the picture changes: the error, its type and its traceback stay what they are, so that
    elsewhere, in a debugger and in tests, every frame can be seen. Where the package itself broke
    down, a notebook shows every frame too.
    """
    folder = os.path.join(folder, "")

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # Ctrl-C too: it strikes in the middle of the scheduler
                if not hasattr(type(error), "_render_traceback_"):
                    # The name by which IPython asks an error for its own picture.
                    error._render_traceback_ = functools.partial(_picture, error, folder)
                raise

        return call

    return decorate


def _picture(error, folder):
    entries, traceback = [], error.__traceback__
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    if not _broke_down(error, entries, folder):
        entries = list(_users(entries, folder))
    following, seen = None, collections.Counter()
    places = [(entry.tb_frame.f_code, entry.tb_lasti) for entry in entries]
    seen.update(places)
    for entry, place in zip(reversed(entries), reversed(places), strict=True):
        seen[place] -= 1
        if seen[place] < REPEATED:
            # An interrupt may strike at an instruction that belongs to no line.
            line = entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno
            following = types.TracebackType(following, entry.tb_frame, entry.tb_lasti, line)
    shell = sys.modules["IPython"].get_ipython()  # it is who asks for the picture
    context = error.__context__
    try:
        error.__context__ = _users_context(error, folder)
        return shell.InteractiveTB.structured_traceback(type(error), error, following)
    finally:
        error.__context__ = context


def _users_context(error, folder):
    """The error that the user's code was handling when an interrupt struck; any error's own.

    The package and its libraries handle errors that they expect, all the time: that an interrupt
    struck while they did says nothing to the user.
    """
    context = error.__context__
    while context is not None and not isinstance(error, Exception):
        handler = context.__traceback__ and context.__traceback__.tb_frame.f_code.co_filename
        if handler and not handler.startswith((folder, *_LIBRARIES)):
            break
        context = context.__context__
    return context


def _users(entries, folder):
    """The entries of a traceback but for those of the package and of the libraries it calls."""
    inside = False
    for entry in entries:
        file = entry.tb_frame.f_code.co_filename
        if file.startswith(folder):
            inside = True
        elif not (inside and file.startswith(_LIBRARIES)) or "__unit__" in entry.tb_frame.f_globals:
            inside = False  # the globals of a rebuilt kernel say so, wherever its file is
            yield entry


def _broke_down(error, entries, folder):
    """True for a fault of the package: it raised nothing, and no line of the user was running."""
    inside = [entry.tb_frame.f_code.co_filename.startswith(folder) for entry in entries]
    if not inside[-1] or not isinstance(error, Exception):
        return False
    below = entries[inside.index(True):]
    code = entries[-1].tb_frame.f_code.co_code
    return len(list(_users(below, folder))) == 0 and code[entries[-1].tb_lasti] != _RAISE
