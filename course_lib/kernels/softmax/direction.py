"""All kernels of one direction, forward or backward, and its ladder."""

import functools

from course_lib.kernels.blocks import columns
from course_lib.kernels.blocks.row_plan import SLOTS, fits_team, usable_slots
from course_lib.kernels.operation import Ladder, Rung, Way
from course_lib.kernels.softmax import ladder, plan, registers, split, streamed, strided
from course_lib.runtime.host.launch import launch


class Direction:
    """One pass: its ladder, whose ways launch a plan on `operands`, the inputs and the output.

    Operands are contiguous, and nothing may be empty.
    """

    def __init__(self, formulas, of_ladder, of_registers, of_split, of_streamed, of_strided):
        """The functions make each rung's kernels of this direction, for `formulas`."""
        by_slots = {n_slots: of_registers(formulas, n_slots) for n_slots in SLOTS}
        self.team = {n: team for n, (team, _) in by_slots.items() if fits_team(n, 4, 1)}
        self.block = {n: block for n, (_, block) in by_slots.items() if n > 1}
        self.split = of_split(formulas)
        self.streamed = of_streamed(formulas)  # (statistics kernel, finishing kernel)
        self.held, self.streamed_columns = strided.by_access(of_strided, formulas)
        self.LADDER = Ladder(
            *(
                Rung(name, functools.partial(_launch_by_element, name, kernel), (kernel,))
                for name, kernel in of_ladder(formulas).items()
            ),
            Rung("registers", ways=(
                _way("team", plan.team, self.team), _way("block", plan.block, self.block),
            )),
            Rung("split", ways=(
                _way("shared", plan.shared, {None: self.split}),
                _way("cluster", plan.cluster, {None: self.split}, plan.CLUSTERS),
                Way(
                    "streamed", plan.streamed,
                    functools.partial(plan.on_boundaries, plan.launch_streamed, self.streamed),
                    self.streamed,
                ),
            )),
            Rung("strided", ways=(
                Way("held", plan.held, *_as_it_is(self.held)),
                Way("streamed", plan.streamed_columns, *_as_it_is(self.streamed_columns)),
            )),
            prefer=plan.preferred,
        )  # fmt: skip

    def specialisations(self, n_inputs, dtypes):
        """(label, kernel, argument types) of all that ways compile; arrays as (dtype, 1)."""
        for dtype in dtypes:
            row, numbers = (dtype, 1), ("float32", 1)
            inputs, operands = [row] * n_inputs, [row] * (n_inputs + 1)
            part = ["int64", "int64", "int64"]
            for name, rung in self.LADDER.items():
                if rung.launch:
                    yield f"{name} {dtype}", *rung.kernels, [*operands, "int64"]
            itemsize = 4 if dtype == "float32" else 2
            for n_slots in usable_slots(itemsize):
                common = f"registers, {n_slots} slots, {dtype}"
                if fits_team(n_slots, itemsize, n_inputs):
                    team = ["int64", "int64", "int64"]
                    yield f"{common}, team", self.team[n_slots], [*operands, *team]
                if n_slots > 1:
                    yield f"{common}, block", self.block[n_slots], [*operands, "int64"]
            yield f"split {dtype}", self.split, [*operands, *part]
            first, second = self.streamed
            yield f"split, statistics, {dtype}", first, [*inputs, numbers, *part]
            yield f"split, finish, {dtype}", second, [*operands, numbers, *part]
            yield from self._of_columns(n_inputs, dtype)

    def _of_columns(self, n_inputs, dtype):
        types = [(dtype, 1)] * (n_inputs + 1) + ["int64"] * 3
        for (vectors, n_slots), kernel in (self.held | self.streamed_columns).items():
            width = (4 if dtype == "float32" else 8) if vectors else 1
            how = "vectors" if vectors else "elements"
            if n_slots is None:
                yield f"strided, streamed, {how}, {dtype}", kernel, types
            elif n_slots * width * n_inputs <= columns.MOST_VALUES:
                yield f"strided, {n_slots} held, {how}, {dtype}", kernel, types


def forward_direction(formulas):
    """The forward pass of one operation."""
    return Direction(
        formulas, ladder.forward_kernels, registers.forward_kernels, split.forward_kernel,
        streamed.forward_kernels, strided.forward_kernels,
    )  # fmt: skip


def backward_direction(formulas):
    """The backward pass of one operation."""
    return Direction(
        formulas, ladder.backward_kernels, registers.backward_kernels, split.backward_kernel,
        streamed.backward_kernels, strided.backward_kernels,
    )  # fmt: skip


def _way(name, find, kernels, *needs):
    launch = functools.partial(plan.on_boundaries, plan.launch_one, kernels)
    return Way(name, find, launch, kernels.values, *needs)


def _as_it_is(kernels):
    """(launch, kernels) of a way that takes operands wherever they begin."""
    return functools.partial(plan.launch_one, kernels), kernels.values


def _launch_by_element(name, kernel, problem, operands):
    block = ladder.BLOCK_SIZE
    n_blocks = -(-problem.n_rows // block) if name == "naive" else problem.n_rows
    launch(kernel, n_blocks, block, *operands, problem.n_cols, flat=True)
