"""How a race is told: what happened, and what would mend it."""

import ast
import re

from course_lib.simulator.sanitizer.shadow import THREAD_AT, THREAD_MASK

_LOST = "reads it, changes it and writes it back in both, so that one change is lost; "


def _same_element(site, other, who):
    """No barrier mends this: one of two results is lost, in whichever order they come."""
    if all(re.search(r"\[\d+\] *=", each.source) for each in (site, other)):
        return f"which of the two stays is chance: let {who} write one thing there, or none"
    return f"two {who} write the same element: look at the index"


class RaceSentences:
    """The part of `verdicts.Verdicts` that finds the words for races.

    A side is (verb, site, thread's name, block's name); if there is a write and a read, the write
    comes first.
    """

    def race_in_block(self, sides, element, stamp):
        """The sentence about two threads of one block."""
        (first, site, one, _), (second, other, two, _) = sides
        head = f"threads {one} and {two} race on {element}: "
        barrier = self.missing_barrier(stamp)
        scope = ", which orders the threads of one block alone" * element.startswith("global ")
        if self.is_update(site, other):
            return f"{head}line {site.line} {_LOST}use cuda.atomic.add or its kin"
        if first == second == "write" and site is other and not self.is_exchange(site):
            return (f"{head}line {site.line} writes it in both, and the last one wins; let one "
                    f"thread write it, give each its own element, or use an atomic")
        if element.startswith("global ") and site.kind == other.kind == "store":
            return f"{head}{self.two_stores(site, other)}; {_same_element(site, other, 'threads')}"
        if (site.kind == "atomic") != (other.kind == "atomic"):
            atomic, plain, verb = (site, other, second) if site.kind == "atomic" else (
                other, site, first)
            return (f"{head}line {atomic.line} updates it atomically while line {plain.line} "
                    f"{verb}s it plainly, with no barrier between; put {barrier} between "
                    f"them{scope}" + (", or use an atomic there too" if verb == "write" else ""))
        if site.line == other.line:
            return (f"{head}line {site.line} {first}s it in one while it {second}s it in the "
                    f"other, with no barrier between; {self.mend_line(site, barrier)}{scope}")
        outside = self.outside_branch(site, other)
        if outside:
            return (f"{head}line {site.line} {first}s it while line {other.line} {second}s it, "
                    f"with no barrier between; put {barrier} {outside}{scope}")
        lines, where = self.around(site, other, (first, second), self.barrier_lines(site))
        if lines:
            return f"{head}{lines}, with no barrier between; put {barrier} {where}{scope}"
        return (f"{head}line {site.line} {first}s it while line {other.line} {second}s it, with "
                f"no barrier between; put {barrier} between them{scope}")

    def around(self, site, other, verbs, barriers):
        """(what two lines do, where a barrier belongs) if one of the lines `barriers` lies between
        them, so that they collide the other way round: in the next round of a loop. ("", "") else.
        """
        loop = self.loop_around(site, other)
        early, late = sorted((site, other), key=lambda s: s.line)
        again = early.function == late.function != self.launch.program.entry.name
        if not (loop or again) or not any(early.line < line < late.line for line in barriers):
            return "", ""
        verbs = dict(zip((site.line, other.line), verbs, strict=True))
        when, before = ("in the next round of the loop", "the loop goes round") if loop else (
            f"when {site.function} is called again", "the function returns")
        return (f"line {late.line} {verbs[late.line]}s it while line {early.line}, {when}, "
                f"{verbs[early.line]}s it", f"after line {late.line}, before {before}")

    def outside_branch(self, site, other):
        """Where a barrier belongs between two lines in one `if` of a loop that has no barrier: not
        into the `if`, which some threads skip. "" if the lines are not such.
        """
        loop = self.loop_around(site, other)
        if not loop or any(loop[0] <= line <= loop[1] for line in self.barrier_lines(site)):
            return ""
        early, late = sorted((site, other), key=lambda s: s.line)
        branch = self.branch_around(early, loop[0])
        if branch is None or branch != self.branch_around(late, loop[0]):
            return ""
        return f"into the loop, after line {late.line} and outside the `if` of line {branch}"

    def mend_line(self, site, barrier):
        """What mends a race of a line with itself."""
        loop = self.loop_around(site, site)
        if loop and not any(loop[0] <= line <= loop[1] for line in self.barrier_lines(site)):
            branch = self.branch_around(site, loop[0])
            outside = f" and outside the `if` of line {branch}" if branch else ""
            return f"put {barrier} into the loop, after line {site.line}{outside}"
        return (f"if both should run it, read it into a name first, then write it, and between "
                f"the two put {barrier}")

    def race_between(self, sides, element, one_cluster, polled):
        """The sentence about threads of two blocks, of one cluster or not.

        `polled` is where a loop waited for a flag that told of the first, with no fence since.
        """
        (first, site, _, one), (second, other, _, two) = sides
        head = f"blocks {one} and {two} race on {element}: "
        if self.is_update(site, other):
            if self.takes_locks:
                return (f"{head}line {site.line} {_LOST}put cuda.threadfence() after taking the "
                        f"lock and before giving it up, or use cuda.atomic.add or its kin")
            return f"{head}line {site.line} {_LOST}use cuda.atomic.add or its kin"
        lines = (f"line {site.line} {first}s it in one while it {second}s it in the other"
                 if site.line == other.line else
                 f"line {site.line} {first}s it while line {other.line} {second}s it")
        if polled and not (site.relaxed and other.relaxed):
            own = any("threadfence_block" in each.text for each in self.known_sites)
            return (f"{head}{lines}, and between the loop on line {polled.line} that waits for the "
                    f"flag and what relies on it there is no cuda.threadfence()"
                    f"{' (threadfence_block reaches its own block alone)' * own}; put it after "
                    f"that loop, before any barrier, in the thread that looks at the flag")
        if first == second == "write" and site is other:
            return (f"{head}line {site.line} writes it in both, and the last one wins; give each "
                    f"block its own elements, or use an atomic")
        if element.startswith("global ") and site.kind == other.kind == "store":
            return f"{head}{self.two_stores(site, other)}; {_same_element(site, other, 'blocks')}"
        if site.relaxed and other.relaxed and {site.kind, other.kind} == {"store", "atomic"}:
            store, atomic = (site, other) if site.kind == "store" else (other, site)
            return (f"{head}line {store.line} stores to it while line {atomic.line} updates it "
                    f"atomically, and a store may fall into the middle of an atomic and be lost; "
                    f"use cuda.atomic.exch on line {store.line}")
        if one_cluster:
            barriers = [site.line for site in self.known_sites
                        if site.number in self.cluster_barriers]
            again, where = self.around(site, other, (first, second), barriers)
            return (f"{head}{again or lines}, with no barrier of the cluster between; put "
                    f"cluster_sync() {where or 'between them'}")
        if self.uses_flags:
            return (f"{head}{lines}, and nothing orders them; let the flag or lock tell of it only "
                    f"after the writes of all lanes and cuda.threadfence(), and read only when all "
                    f"have told, after cuda.threadfence() again")
        grid_barriers = [site.line for site in self.known_sites if site.kind == "grid"]
        if grid_barriers:
            again, where = self.around(site, other, (first, second), grid_barriers)
            return (f"{head}{again or lines}, with no barrier of the grid between; put "
                    f"cuda.cg.this_grid().sync() {where or 'between them'}")
        return (f"{head}{lines}, and blocks run in any order, which no barrier of theirs changes; "
                f"write into another array, or split the kernel into two launches")

    @staticmethod
    def two_stores(site, other):
        """What two lines do that write one element."""
        if site.line == other.line:
            return f"line {site.line} writes it twice, once in each, and the last one wins"
        one, two = sorted((site.line, other.line))
        return f"line {one} writes it in one and line {two} in the other, and the last one wins"

    # -- what the kernel looks like --------------------------------------------------------------

    def missing_barrier(self, stamp):
        """The call that is missing: syncwarp within a warp of a kernel that knows it."""
        one, two = stamp >> THREAD_AT & THREAD_MASK, self.acting.tid
        if one // 32 == two // 32 and any("syncwarp" in site.text for site in self.known_sites):
            return "cuda.syncwarp()"
        return "cuda.syncthreads()"

    @property
    def known_sites(self):
        """All sites that the kernel has."""
        return [site for site in self.sites if site is not None]

    def barrier_lines(self, near):
        """Lines with a barrier, in the file of `near`."""
        return [site.line for site in self.known_sites
                if site.filename == near.filename
                and (site.kind == "barrier" or "syncwarp" in site.text
                     or site.number in self.cluster_barriers)]

    def loop_around(self, site, other):
        """(first, last) line of the innermost loop with both sites in it, or None."""
        if site.filename != other.filename:
            return None
        low, high = sorted((site.line, other.line))
        loops = [(loop.lineno, loop.end_lineno) for unit in self.launch.program.units.values()
                 if unit.tree is not None and unit.filename == site.filename
                 for loop in ast.walk(unit.tree) if isinstance(loop, (ast.For, ast.While))
                 and loop.lineno <= low and high <= loop.end_lineno]
        return max(loops, default=None)

    def branch_around(self, site, below):
        """The line of the outermost `if` around a site that begins below a line; None if none."""
        found = [node.lineno for unit in self.launch.program.units.values()
                 if unit.tree is not None and unit.filename == site.filename
                 for node in ast.walk(unit.tree) if isinstance(node, ast.If)
                 and below < node.lineno < site.line <= node.end_lineno]
        return min(found, default=None)

    def is_update(self, site, other):
        """True if both are parts of one `x[i] += …`, or of one `x[i] = x[i] + …`."""
        place = _updated(site)
        return place == _updated(other) and not self.is_exchange(site) and {"load", "store"} <= {
            s.kind for s in self.known_sites if _updated(s) == place}

    def is_exchange(self, site):
        """True if the site is part of `a, b = b, a`, which no atomic makes."""
        return any(isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
                   and node.lineno <= site.line <= node.end_lineno
                   for unit in self.launch.program.units.values()
                   if unit.tree is not None and unit.filename == site.filename
                   for node in ast.walk(unit.tree))

    @property
    def uses_flags(self):
        """True if the kernel passes data between blocks: by loops that wait, or by atomics whose
        answer it uses.
        """
        return any(site.relaxed and site.kind != "store" for site in self.known_sites)

    @property
    def takes_locks(self):
        """True if the kernel exchanges values atomically, as locks do."""
        return any(site.kind == "atomic" and any(
            name in site.text for name in (".cas(", ".compare_and_swap(", ".exch("))
            for site in self.known_sites)


def _updated(site):
    """What a site reads or writes, and the line in which it does."""
    return site.filename, site.line, site.text


def made_to_meet(one, other):
    """True if neither needs an order: an atomic, or what waits for it or tells it something.

    A plain store beside another, or beside an atomic, does, whatever fence stands before it: one
    of the values is lost.
    """
    return is_relaxed(one) and is_relaxed(other) and not (
        "store" in (one.kind, other.kind) and {one.kind, other.kind} <= {"store", "atomic"})


def is_relaxed(site):
    """True for atomics, and for accesses made to be raced."""
    return site.relaxed or site.kind == "atomic"
