"""Plans of drawn problems, without a GPU: no shape falls off a cliff that is not listed here.

Seven chips plan every operation on extents that nobody chose: log-uniform, half of them multiples
of 8, in both memory formats, some off 16-byte boundaries; with so much work that starting it takes
little of the time. For each pass

products  at most twice the multiply-adds that are wanted are executed, unless memory takes longer
blocks    what is much work has a block for each multiprocessor
narrow    what moves many bytes moves 8 at a time, or more
step      an extent that is one larger does not change what a pass costs, for what it must, 1.3×
"""

import math
import random
from pathlib import Path

import plans
import torch
from test_chips import CHIPS

STEPPED = CHIPS[1], CHIPS[4]  # chips on which extents are taken one larger, too
DRAWS, SEED = 8, 2026
MUCH, MOST = 24 << 20, 1 << 29  # bytes of a tensor, or what takes as long
FORMATS = torch.contiguous_format, torch.channels_last


def listed():
    """What breaks a rule, and why, by plans.txt: below each reason, what it is the reason of."""
    text = (Path(__file__).parent / "plans.txt").read_text(encoding="utf-8")
    for paragraph in text.strip().split("\n\n"):
        reason, *broken = paragraph.splitlines()
        assert reason.startswith("# ") and broken
        yield from (line.strip() for line in broken)


def drawn(name):
    """(extents, function that makes tensors) of each draw; always the same."""
    generator, (_, ranges) = random.Random(f"{SEED} {name}"), plans.OPERATIONS[name]
    while True:
        extents = {}
        for extent, most in ranges.items():
            size = math.ceil(most ** generator.random())
            extents[extent] = generator.choice((size, plans.up(size, 8)))
        how = generator.choice((torch.bfloat16, torch.float32)), generator.choice(FORMATS)
        sizes = [extents[extent] for extent in ranges if extent != "K" or len(ranges) == 3]
        if MUCH < math.prod(sizes) * how[0].itemsize < MOST:
            yield extents, maker(*how, generator.random() < 0.2)


def maker(dtype, memory_format, is_sliced):
    """make(*shape): an empty tensor; a sliced one begins one element behind a boundary."""

    def make(*shape):
        if is_sliced and len(shape) == 2:
            return torch.empty(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)
        kind = memory_format if len(shape) == 4 else FORMATS[0]
        return torch.empty(shape, dtype=dtype, memory_format=kind)

    return make


def breaks(name, chip, extents, make):
    """"pass: rule of kernel", for each rule that is broken."""
    operation, _ = plans.OPERATIONS[name]
    found = plans.passes(operation, chip, make, extents.values())
    for direction, one in found.items():
        for launch in one.launches:
            if launch.work > MUCH and launch.blocks < chip.multiprocessors:
                yield f"{direction}: blocks of {launch.kernel}"
            if launch.bytes > MUCH and launch.is_narrow:
                yield f"{direction}: narrow {launch.kernel}"
        executed = sum(launch.multiply_adds for launch in one.launches)
        if executed > 2 * one.multiply_adds and executed > plans.RIDGE * max(one.bytes, MUCH):
            yield f"{direction}: products of {most_work(one)}"
    for extent in extents if chip in STEPPED else ():
        larger = extents | {extent: extents[extent] + 1}
        others = plans.passes(operation, chip, make, larger.values())
        for direction, one in found.items() if extents[extent] >= 16 else ():
            less, more = sorted((one, others[direction]), key=lambda each: each.excess(chip))
            if one.least > MUCH and more.excess(chip) > 1.3 * less.excess(chip):
                yield f"{direction}: step to {most_work(more)}"


def most_work(one):
    return max(one.launches, key=lambda launch: launch.work).kernel


def test_no_plan_breaks_a_rule_unless_it_is_listed():
    found = {}
    for name in plans.OPERATIONS:
        draws = drawn(name)
        for _ in range(DRAWS):
            extents, make = next(draws)
            for chip in CHIPS:
                for each in breaks(name, chip, extents, make):
                    found.setdefault(f"{name} {each}", (chip.name, extents))
    known = [*listed()]
    assert len(known) == len(set(known))
    assert not {key: where for key, where in found.items() if key not in known}
    fixed = set(known) - found.keys()
    assert not fixed, f"no longer broken, so to be taken off plans.txt: {sorted(fixed)}"
