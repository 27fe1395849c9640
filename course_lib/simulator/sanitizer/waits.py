"""The sanitizer's view of waiting: barriers that not all reach, shuffles without a partner."""

import ast
import linecache

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.engine.report import position
from course_lib.simulator.sanitizer.findings import Finding, listed, name_of, plural, threads_text


class Waits:
    """The part of `checking.Checking` that looks at barriers and warp operations."""

    def names(self, threads):
        """Threads as sentences name them."""
        return [self.thread_name(thread.index) for thread in threads]

    # -- block barriers --------------------------------------------------------------------------

    def barrier_released(self, block, threads):
        if block.live < len(block.threads):
            self.exited_before(block, threads)
        first = threads[0].where
        if any(thread.where != first for thread in threads):
            self.different_barriers(block, threads)
        self.pass_barrier(threads)

    def different_barriers(self, block, threads):
        """Threads wait at barriers on different lines, in different rounds, or calls."""
        groups = {}
        for thread in threads:
            groups.setdefault(thread.where, []).append(thread)
        (one, here), (two, there) = sorted(
            groups.items(), key=lambda item: [(self.sites[number].line, rounds)
                                              for number, rounds in _path(item[0])])[:2]
        # The outermost place where they part.
        (first, mine), (second, its) = next(
            pair for pair in zip(_path(one), _path(two), strict=False) if pair[0] != pair[1])
        barrier, first, second = self.sites[one[0]], self.sites[first], self.sites[second]
        who, others = threads_text(self.names(here)), threads_text(self.names(there))
        cure = "every thread of a block must reach the same barrier, so take it out of the branch"

        def sentence():
            if first is second:
                return (f"{who} wait{_s(here)} at the barrier on line {barrier.line} in round "
                        f"{_shown(mine)} of the loop while {others} wait{_s(there)} there in round "
                        f"{_shown(its)}; every thread of a block must reach it in the same rounds, "
                        f"so take it out of the branch")
            if "call" in (first.kind, second.kind):
                return (f"{who} wait{_s(here)} at the barrier that line {first.line} leads to "
                        f"while {others} wait{_s(there)} at the one that line {second.line} leads "
                        f"to; {cure}")
            place = f"line {second.line}" if second.line != first.line else "the same line"
            return (f"{who} wait{_s(here)} at the barrier on line {first.line} while {others} "
                    f"wait{_s(there)} at the one on {place}; {cure}")

        self.report((first.number, second.number), "barrier-divergence", first,
                    self.names([here[0], there[0]]), block.index, sentence,
                    (first.line, second.line))

    def exited_before(self, block, threads, whole=False):
        """Some threads have exited, and others wait; `whole` if not even whole warps may leave."""
        gone = [thread for thread in block.threads if thread.resume is None]
        waiting = {thread.tid // 32 for thread in threads}
        site = self.sites[threads[0].at]
        left = [thread for thread in gone
                if thread.left_at and (whole or thread.tid // 32 in waiting)]
        past = [thread for thread in gone if not thread.left_at]
        if left:
            place = self.sites[left[0].left_at]

            def sentence():
                return (f"{threads_text(self.names(left))} return{_s(left)} on line "
                        f"{place.line} while {threads_text(self.names(threads))} "
                        f"wait{_s(threads)} at the barrier on line {site.line}; let every thread "
                        f"reach the barrier, and guard the work instead of returning")

            self.report((place.number, site.number), "exited-before-barrier", place,
                        self.names([left[0], threads[0]]), block.index, sentence,
                        (place.line, site.line))
        if past:
            def sentence():
                return (f"{threads_text(self.names(past))} never reach{_es(past)} the barrier on "
                        f"line {site.line} that {threads_text(self.names(threads))} "
                        f"wait{_s(threads)} at; every thread of a block must reach it, and equally "
                        f"often, so take it out of the branch or loop")

            self.report((site.number,), "barrier-mismatch", site,
                        self.names([past[0], threads[0]]), block.index, sentence)

    # -- warps -----------------------------------------------------------------------------------

    def warp_released(self, block, group):
        threads = [entry[0] for entry in group.values()]
        self.check_sources(block, group, threads)
        self.check_mask(block, group, threads)
        self.pass_warp(threads)

    def check_sources(self, block, group, threads):
        """A shuffle that reads from a lane which took no part."""
        source_of = getattr(threads[0].op[1], "source", None)
        for lane, (thread, payload) in group.items() if source_of else ():
            source = source_of(lane, payload[1])
            if source in group:
                continue
            site, name = self.sites[thread.at], self.thread_name(thread.index)

            def sentence(lane=lane, source=source, site=site, name=name):
                return (f"thread {name} (lane {lane}) reads from lane {source} in the shuffle on "
                        f"line {site.line}, but that lane takes no part in it, so the value is "
                        f"undefined; let all lanes of the mask call it, and read only from those")

            self.report((site.number,), "shuffle-inactive-lane", site, (name,), block.index,
                        sentence)
            return

    def check_mask(self, block, group, threads):
        """A mask that names lanes which ran past the call to the kernel's end."""
        mask = threads[0].op[2] if type(threads[0].op) is tuple else 0
        if not mask:
            return
        first = threads[0].tid - threads[0].lane
        missing = [thread for thread in block.threads[first:first + 32]
                   if mask >> thread.lane & 1 and thread.lane not in group
                   and not thread.left_at]
        if missing:
            self.missing_lanes(block, threads, missing, mask, "ran past it")

    def missing_lanes(self, block, threads, missing, mask, why):
        """A finding about lanes that a mask names and that do not come."""
        site = self.sites[threads[0].at]

        def sentence():
            lanes = listed([thread.lane for thread in missing])
            one = len(missing) == 1
            return (f"the mask {mask:#010x} on line {site.line} names lane{'' if one else 's'} "
                    f"{lanes}, which {why} while lane"
                    f"{'s' if len(threads) > 1 else ''} "
                    f"{listed([thread.lane for thread in threads])} wait there; let every lane of "
                    f"the mask make the call, or take it out of the mask")

        self.report((site.number, "mask"), "shuffle-inactive-lane", site,
                    self.names([missing[0], threads[0]]), block.index, sentence)

    def stuck(self, block):
        """Lanes that wait for others which wait elsewhere: tell, and let them go on."""
        for warp in block.warps:
            for key, group in list(warp.groups.items()):
                if not group:
                    continue
                threads = [entry[0] for entry in group.values()]
                first = threads[0].tid - threads[0].lane
                missing = [thread for thread in block.threads[first:first + 32]
                           if key[1] & warp.live & 1 << thread.lane
                           and thread.lane not in group]
                if missing:
                    line = self.sites[missing[0].at].line if missing[0].at else "?"
                    self.missing_lanes(block, threads, missing, key[1],
                                       f"wait on line {line}")
                block.finish_group(warp, key)
                return True
        return False

    # -- the grid, fences, the end ---------------------------------------------------------------

    def grid_released(self, threads):
        blocks = {}
        for thread in threads:
            blocks.setdefault(thread.b, []).append(thread)
        for block, group in blocks.items():
            if block.live < len(block.threads):
                self.exited_before(block, group, whole=True)
            if any(thread.where != group[0].where for thread in group):
                self.different_barriers(block, group)
        came = {block.index for block in blocks}
        missing = next((index for index in np.ndindex(*reversed(self.launch.grid_dim))
                        if index[::-1] not in came), None)
        if missing is not None:
            self.block_skips_grid(missing[::-1], threads[0])
        self.pass_grid(threads)

    def block_skips_grid(self, index, waiting):
        """A block has run to its end while others wait for the whole grid."""
        site = self.sites[waiting.at]

        def sentence():
            dims = self.launch.grid_dim
            return (f"no thread of block {name_of(index, dims)} reaches the grid barrier on line "
                    f"{site.line} that block {name_of(waiting.b.index, dims)} waits at; every "
                    f"thread of the grid must reach it, and equally often, so take it out of the "
                    f"branch or loop")

        self.report((site.number, "grid"), "barrier-mismatch", site, self.names([waiting]),
                    waiting.b.index, sentence)

    def fence(self, thread, number, scope):
        self.pass_fence(thread, scope)

    def endless_poll(self, thread, number, array):
        memory = getattr(array, "memory", None)
        if array is not None and (memory is None or memory.space == "local"):
            return
        site = self.sites[number]

        def sentence():
            return (f"the loop waits for `{site.text}` on line {site.line}, and nothing in it "
                    f"makes the compiler read that again: it reads once, and then the loop jumps "
                    f"to itself for ever; ask with an atomic that adds 0")

        self.report((number,), "endless-poll", site, (self.thread_name(thread.index),),
                    thread.b.index, sentence)

    def absorbs(self, error):
        if isinstance(error, errors.Deadlock):
            self.deadlock(error)
            return True
        if isinstance(error, errors.MaskError):
            if error.place:
                filename, line, _ = error.place
                words = str(error)
            else:
                line, filename = _line_of(error)
                words = f"{error}; name every lane that makes the call in the mask, itself included"
            self.note("shuffle-inactive-lane", filename, line, (), (0, 0, 0), words)
            return True
        return False

    def deadlock(self, error):
        """The launch cannot go on: say who waits for what."""
        launch = self.launch
        waiting = [thread for block in launch.active for thread in block.threads
                   if thread.resume is not None]
        text = str(error)
        if not waiting:
            line, filename = _line_of(error)
            self.note("deadlock", filename, line, (), (0, 0, 0), (
                f"the loop on line {line} never ends in {launch.name}; let every path through it "
                f"come nearer to its end"), _ENDLESS)
            return
        spinning = [thread for thread in waiting
                    if thread in thread.b.spinning or thread in thread.b.ready]
        thread = (spinning or waiting)[0]
        place = self.place_of(thread)
        filename, line = place
        title, loop = "", self.loop_of(thread) if spinning else None
        if loop is not None:
            same = [other for other in waiting if other.b is thread.b
                    and not is_held(other) and self.loop_of(other, loop) is loop]
            flags = self.uses_flags and may_wait(loop)
            title = "" if flags or any(map(is_held, waiting)) else _ENDLESS
        else:
            same = [other for other in waiting if other.b is thread.b
                    and self.place_of(other) == place]
        names = self.names(same)
        verb = "go" if plural(names) else "goes"
        block = name_of(thread.b.index, launch.grid_dim)
        if spinning:
            message = (f"{threads_text(names)} of block {block} {verb} round the loop on line "
                       f"{line} for ever; let every round come nearer to its end")
            if not title or may_wait(loop):
                message += (", and if it waits for another thread, let that one run and write "
                            "what it waits for")
            if not title and plural(names) and "iterations passed" in text:  # it may end yet
                message = (f"{threads_text(names)} of block {block} did not all leave the loop on "
                           f"line {line} within {launch.max_steps:,} rounds of all threads; let "
                           f"one thread look at the flag while the others wait at a barrier, and "
                           f"let another thread write what it waits for")
        else:
            message = (f"{threads_text(names)} of block {block} wait{_s(same)} on line {line} and "
                       f"nobody can let them go on; let all the threads it waits for reach it")
        if "grid" in text and not spinning:
            message += ", in every block"
        self.note("deadlock", filename, line, tuple(names[:2]), thread.b.index, message, title)

    def place_of(self, thread):
        """(file, line) where a thread waits; of the loop, if it goes round one."""
        place = position(thread)
        if place is None:
            return "", 0
        filename, line, _ = place
        if thread not in thread.b.spinning and thread not in thread.b.ready:
            return filename, line
        loop = self.loop_of(thread)
        return filename, line if loop is None else loop.lineno

    def loop_of(self, thread, loop=None):
        """The innermost loop where a thread is, or `loop` if it is anywhere in that; else None."""
        place = position(thread)
        if place is None:
            return None
        filename, line, _ = place
        loops = [each for unit in self.launch.program.units.values()
                 if unit.tree is not None and unit.filename == filename
                 for each in ast.walk(unit.tree)
                 if isinstance(each, (ast.For, ast.While))
                 and each.lineno <= line <= each.end_lineno]
        if loop is not None:
            return loop if any(each is loop for each in loops) else None
        return max(loops, key=lambda each: each.lineno, default=None)

    def note(self, kind, filename, line, threads, block, message, title=""):
        """A finding at a line that is no site."""
        key = (kind, self.launch.name, filename, line)
        for report in self.reports:
            if not report.again(key):
                report.add(key, Finding(
                    kind, line, filename, linecache.getline(filename, line).strip(), threads,
                    name_of(block, self.launch.grid_dim), message, (line,), self.launch.name,
                    title=title))


#: What a deadlock is called where no thread waits at a barrier.
_ENDLESS = "endless loop"


def is_held(thread):
    """True if a thread waits at a barrier or a warp operation, and does not go round a loop."""
    return thread.b.waiting_for(thread).startswith("wait")


def may_wait(loop):
    """True if a loop may wait for what another thread writes, by what its condition looks at."""
    return isinstance(loop, ast.While) and (isinstance(loop.test, ast.Constant) or any(
        isinstance(node, (ast.Subscript, ast.Call)) for node in ast.walk(loop.test)))


def _line_of(error):
    """The innermost line of user code in an error's traceback."""
    found, traceback = (0, ""), error.__traceback__
    while traceback is not None:
        if "__unit__" in traceback.tb_frame.f_globals:
            found = traceback.tb_lineno, traceback.tb_frame.f_code.co_filename
        traceback = traceback.tb_next
    return found


def _path(where):
    """[(number of the site, rounds of the loops around)] of the calls around a wait, and of it."""
    path = []
    while where:
        number, rounds, where = where
        path.append((number, rounds))
    return path[::-1]


def _shown(rounds):
    """Rounds of nested loops, outermost first."""
    return ", ".join(map(str, rounds))


def _s(threads):
    return "s" if len(threads) == 1 else ""


def _es(threads):
    return "es" if len(threads) == 1 else ""
