"""All kernels of one direction, forward or backward, and how each rung is launched."""

import functools

from course_lib.kernels.blocks.row_plan import SLOTS, fits_team, row_plan, stream_plan, usable_slots
from course_lib.kernels.blocks.rows import on_boundaries
from course_lib.kernels.operation import Ladder, Rung
from course_lib.kernels.softmax import ladder, registers, split, streamed
from course_lib.kernels.softmax.plan import ROW_LIMIT, split_plan
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch

CLUSTERS_SINCE = (9, 0)


class Direction:
    """One pass: its ladder, and what the rungs launch on `operands`, the inputs and the output.

    Operands are contiguous, and nothing may be empty.
    """

    def __init__(self, ladder_kernels, registers_kernels, split_kernel, streamed_kernels):
        self.registers = registers_kernels  # slots per thread -> (team kernel, block kernel)
        self.split = split_kernel
        self.streamed = streamed_kernels  # (statistics kernel, finishing kernel)
        of_registers = tuple(kernel for pair in registers_kernels.values() for kernel in pair)
        self.LADDER = Ladder(
            *(
                Rung(name, functools.partial(_launch_by_element, name, kernel), (kernel,))
                for name, kernel in ladder_kernels.items()
            ),
            Rung("registers", self._launch_registers, of_registers, (row_plan, on_boundaries)),
            Rung(
                "split", self._launch_split, (split_kernel, *streamed_kernels),
                (split_plan, stream_plan, on_boundaries),
            ),
        )  # fmt: skip

    def _launch_registers(self, n_rows, n_cols, operands):
        n_arrays = len(operands) - 1
        if n_cols > ROW_LIMIT[n_arrays]:
            raise ValueError(
                f"variant 'registers' takes rows of at most {ROW_LIMIT[n_arrays]:,} elements, "
                f"not {n_cols:,}: use 'split'"
            )
        vectors = on_boundaries(n_cols, operands)
        n_slots, team_bits, n_threads = row_plan(n_cols, operands[0].dtype.itemsize, n_arrays)
        team_kernel, block_kernel = self.registers[n_slots]
        if team_bits is None:
            kernel, n_blocks, numbers = block_kernel, n_rows, (n_cols,)
        else:
            kernel, n_blocks = team_kernel, -(-(n_rows << team_bits) // n_threads)
            numbers = n_rows, n_cols, team_bits
        launch(kernel, n_blocks, n_threads, *operands, *numbers, vectors, flat=True, overlap=True)

    def _launch_split(self, n_rows, n_cols, operands):
        itemsize, n_arrays = operands[0].dtype.itemsize, len(operands) - 1
        capability, shared_bytes = chip_of(operands[0])
        clusters = capability >= CLUSTERS_SINCE
        plan = split_plan(n_cols, itemsize, n_arrays, shared_bytes, clusters)
        if plan is None:
            self._launch_streamed(stream_plan(n_cols), n_rows, n_cols, operands)
            return
        launch(
            self.split, n_rows << plan.part_bits, plan.n_threads,
            *operands, n_cols, plan.length, plan.part_bits, on_boundaries(n_cols, operands),
            flat=True, overlap=True, cluster=1 << plan.part_bits,
            shared_bytes=plan.length * itemsize * n_arrays,
        )  # fmt: skip

    def _launch_streamed(self, plan, n_rows, n_cols, operands):
        *inputs, result = operands
        n_blocks = n_rows << plan.part_bits
        # Forward keeps a maximum and a sum of each part, backward a sum.
        statistics = arrays.empty((n_blocks * (3 - len(inputs)),), like=result, dtype="float32")
        numbers = n_cols, plan.length, plan.part_bits, on_boundaries(n_cols, operands)
        first, second = self.streamed
        options = {"flat": True, "overlap": True}
        launch(first, n_blocks, plan.n_threads, *inputs, statistics, *numbers, **options)
        launch(second, n_blocks, plan.n_threads, *operands, statistics, *numbers, **options)

    def specialisations(self, n_inputs, dtypes):
        """(label, kernel, argument types) of all that `launch` compiles; arrays as (dtype, 1)."""
        for dtype in dtypes:
            row, numbers = (dtype, 1), ("float32", 1)
            inputs, operands = [row] * n_inputs, [row] * (n_inputs + 1)
            part = ["int64", "int64", "int64", "boolean"]
            for name, rung in self.LADDER.items():
                if name not in ("registers", "split"):
                    yield f"{name} {dtype}", *rung.kernels, [*operands, "int64"]
            itemsize = 4 if dtype == "float32" else 2
            for n_slots in usable_slots(itemsize):
                team_kernel, block_kernel = self.registers[n_slots]
                common = f"registers, {n_slots} slots, {dtype}"
                if fits_team(n_slots, itemsize, n_inputs):
                    team = ["int64", "int64", "int64", "boolean"]
                    yield f"{common}, team", team_kernel, [*operands, *team]
                if n_slots > 1:
                    yield f"{common}, block", block_kernel, [*operands, "int64", "boolean"]
            yield f"split {dtype}", self.split, [*operands, *part]
            first, second = self.streamed
            yield f"split, statistics, {dtype}", first, [*inputs, numbers, *part]
            yield f"split, finish, {dtype}", second, [*operands, numbers, *part]


def _launch_by_element(name, kernel, n_rows, n_cols, operands):
    block = ladder.BLOCK_SIZE
    n_blocks = -(-n_rows // block) if name == "naive" else n_rows
    launch(kernel, n_blocks, block, *operands, n_cols, flat=True)


def forward_direction(formulas):
    """The forward pass of one operation."""
    return Direction(
        ladder.forward_kernels(formulas),
        {n: registers.forward_kernels(formulas, n) for n in SLOTS},
        split.forward_kernel(formulas),
        streamed.forward_kernels(formulas),
    )


def backward_direction(formulas):
    """The backward pass of one operation."""
    return Direction(
        ladder.backward_kernels(formulas),
        {n: registers.backward_kernels(formulas, n) for n in SLOTS},
        split.backward_kernel(formulas),
        streamed.backward_kernels(formulas),
    )
