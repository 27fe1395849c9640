"""Optimisers: SGD, Adam and AdamW, in place, for a whole list of parameters at once.

Parameters, gradients and states are float32, float16 or bfloat16, computed with in float32. With
`s` bytes an element and n elements in all, a step must move

================== ============ ==================================================================
SGD                3·n·s bytes  read parameter and gradient, write the parameter
… with momentum    5·n·s bytes  and read and write the momentum buffer
Adam, AdamW        7·n·s bytes  and read and write two running averages
================== ============ ==================================================================

and compute a few operations an element, so memory is the limit; for a small network, the launches.

============ =====================================================================================
rung         a step is
============ =====================================================================================
`naive`      a launch for each parameter (with Adam another for each count), a thread an element
`fused`      one launch for all parameters of a dtype, 16 bytes at a time, several in flight a
             thread; where the tensors lie is read from a table in the GPU's memory
============ =====================================================================================

Steps are those of `torch.optim`, also the order of operations. Where PyTorch rounds after each
operation, a GPU multiplies and adds in one, so a float32 parameter is within 2 units in the last
place (Adam's within 4) of itself or of its step, whichever is larger, of PyTorch's after a step.
16-bit parameters are rounded once a step, as by PyTorch's fused optimisers.

The learning rate may be a float32 array of one element, and Adam's counts of steps are arrays: both
are read from the GPU's memory as a step runs, so that a captured CUDA graph goes on counting, and
its learning rate can change from one replay to the next. So may be what stops a step (`found_inf`,
see `guarded.py`). Adam: Kingma and Ba, 2015; AdamW:
Loshchilov and Hutter, 2019. Derivation: notebook 10.
"""

import math

from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.kernels.optimizers.adam_kernels import (
    adam_fused_kernel,
    adam_naive_kernel,
    count_kernel,
)
from course_lib.kernels.optimizers.checks import DTYPES, check_found, check_steps, check_together
from course_lib.kernels.optimizers.guarded import GUARDED, guarded
from course_lib.kernels.optimizers.sgd_kernels import sgd_fused_kernel, sgd_naive_kernel
from course_lib.kernels.optimizers.table import (
    BLOCK_SIZE,
    Table,
    chunks_kernel,
    fill_kernel,
)
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

__all__ = ["ADAM", "BLOCK_SIZE", "DTYPES", "SGD", "Table", "adam", "sgd"]

MOST_THREADS = BLOCK_SIZE
STOPPABLE = "optimizers guarded "  # how the labels begin of kernels that `found_inf` can stop


def sgd(
    parameters,
    gradients,
    momentum_buffers=None,
    *,
    lr,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    nesterov=False,
    maximize=False,
    first_step=False,
    variant=AUTO,
    table=None,
    again=False,
    found_inf=None,
):
    """One step of `torch.optim.SGD`, in place.

    parameters, gradients  lists of arrays, pair by pair of one shape, dtype and memory layout
    momentum_buffers       as many again; needed where momentum is not 0
    lr                     a number, or a float32 array of one element
    first_step             the momentum buffers are not read, but begin as the gradients
    table                  a `Table` that the caller keeps from one step to the next; without one,
                           the addresses are written down anew each time
    again                  the table holds these very arrays already: nothing is checked
    found_inf              a float32 array of one element: where it is not 0, nothing is changed

    Raises ArrayError for arrays that do not fit, ValueError for other wrong arguments.
    """
    rung = SGD.rung(variant, parameters)
    if not again:
        buffers = () if momentum == 0 else (("momentum_buffers", momentum_buffers),)
        check_together(parameters, gradients, *buffers)
    check_found(found_inf)
    numbers = (
        float(momentum), 1.0 - float(dampening), float(weight_decay), bool(nesterov),
        bool(maximize), bool(first_step),
    )  # fmt: skip
    states = (parameters,) if momentum == 0 else (momentum_buffers,)
    rung.launch(parameters, gradients, states, None, lr, numbers, table, again, found_inf)


def adam(
    parameters,
    gradients,
    exp_avgs,
    exp_avg_sqs,
    steps,
    *,
    max_exp_avg_sqs=None,
    lr,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    decoupled_weight_decay=False,
    maximize=False,
    variant=AUTO,
    table=None,
    again=False,
    found_inf=None,
):
    """One step of `torch.optim.Adam`, in place; of AdamW with `decoupled_weight_decay`.

    exp_avgs, exp_avg_sqs  the running averages, like the parameters; zeros before the first step
    steps                  float32 arrays of one element: how many steps each parameter has made;
                           counted on. One array may be in the list many times
    max_exp_avg_sqs        given for AMSGrad: the largest exp_avg_sqs so far

    The rest is as in `sgd`.
    """
    amsgrad = max_exp_avg_sqs is not None
    rung = ADAM.rung(variant, parameters)
    if not again:
        named = [("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)]
        named += [("max_exp_avg_sqs", max_exp_avg_sqs)] if amsgrad else []
        check_together(parameters, gradients, *named)
        check_steps(steps, len(parameters))
    check_found(found_inf)
    numbers = _adam_numbers(betas, eps, weight_decay, decoupled_weight_decay, amsgrad, maximize)
    # Where there is no third state, its kernel arguments stand for the second, and are not used.
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad else exp_avg_sqs)
    rung.launch(parameters, gradients, states, steps, lr, numbers, table, again, found_inf)


def _launch_sgd_naive(parameters, gradients, states, steps, lr, numbers, table, again, found_inf):
    kernel, found = guarded(sgd_naive_kernel, found_inf)
    for p, g, b in zip(parameters, gradients, *states, strict=True):
        if n := arrays.size_of(p):
            unused = arrays.empty((1,), like=p, dtype="float32")
            launch(
                kernel, math.ceil(n / BLOCK_SIZE), BLOCK_SIZE,
                *found, p, g, b, *_rate(lr, unused), *numbers, flat=True,
            )  # fmt: skip


def _launch_sgd_fused(parameters, gradients, states, steps, lr, numbers, table, again, found_inf):
    kernel, found = guarded(sgd_fused_kernel, found_inf)
    if not again:
        table = Table() if table is None else table
        table.prepare(parameters, gradients, states, steps)
    for part in table.parts:
        like = parameters[part.members[0]]
        launch(
            kernel, part.n_blocks, BLOCK_SIZE,
            *found, like, part.table, part.chunks, part.length, *_rate(lr, part.unused), *numbers,
            flat=True, overlap=True,
        )  # fmt: skip


def _launch_adam_naive(parameters, gradients, states, steps, lr, numbers, table, again, found_inf):
    kernel, found = guarded(adam_naive_kernel, found_inf)
    for p, g, m, v, peak, step in zip(parameters, gradients, *states, steps, strict=True):
        if n := arrays.size_of(p):
            launch(
                kernel, math.ceil(n / BLOCK_SIZE), BLOCK_SIZE,
                *found, p, g, m, v, peak, step, *_rate(lr, step), *numbers, flat=True,
            )  # fmt: skip
    _count(steps, found_inf)


def _launch_adam_fused(parameters, gradients, states, steps, lr, numbers, table, again, found_inf):
    kernel, found = guarded(adam_fused_kernel, found_inf)
    if not again:
        table = Table() if table is None else table
        table.prepare(parameters, gradients, states, steps)
    if not table.parts:
        _count(steps, found_inf)  # of nothing but empty parameters
    for part in table.parts:
        like = parameters[part.members[0]]
        launch(
            kernel, part.n_blocks, BLOCK_SIZE,
            *found, like, part.table, part.chunks, part.ticket, part.length, part.n_rows,
            part.n_steps, *_rate(lr, part.unused), *numbers, flat=True, overlap=True,
        )  # fmt: skip


def _count(steps, found_inf):
    kernel, found = guarded(count_kernel, found_inf)
    for step in {arrays.address_of(step): step for step in steps}.values():
        launch(kernel, 1, 1, *found, step, flat=True)


def _rate(lr, unused):
    """The learning rate as kernels take it: an array, whether that is it, and else a number."""
    if not hasattr(lr, "shape"):
        return unused, False, float(lr)
    arrays.require(lr, "lr", dtypes=("float32",))
    if arrays.size_of(lr) != 1:
        raise arrays.ArrayError(f"lr must have one element, not shape {tuple(lr.shape)}")
    return lr, True, 0.0


def _adam_numbers(betas, eps, weight_decay, decoupled, amsgrad, maximize):
    beta1, beta2 = map(float, betas)
    logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    return (
        *logs, 1.0 - beta1, beta2, 1.0 - beta2, float(eps), float(weight_decay), bool(decoupled),
        amsgrad, bool(maximize),
    )  # fmt: skip


def _with_twins(*kernels):
    """These kernels, and their twins that `found_inf` can stop."""
    return (*kernels, *(GUARDED[kernel] for kernel in kernels))


SGD = Ladder(
    Rung("naive", _launch_sgd_naive, _with_twins(sgd_naive_kernel)),
    Rung(
        "fused", _launch_sgd_fused,
        (*_with_twins(sgd_fused_kernel), fill_kernel, chunks_kernel),
    ),
    auto="fused",
)  # fmt: skip
ADAM = Ladder(
    Rung("naive", _launch_adam_naive, _with_twins(adam_naive_kernel, count_kernel)),
    Rung(
        "fused", _launch_adam_fused,
        (*_with_twins(adam_fused_kernel, count_kernel), fill_kernel, chunks_kernel),
    ),
    auto="fused",
)  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    table, ticket, rate = ("int64", 1), ("uint32", 1), ("float32", 1)
    lr = [rate, "boolean", "float32"]
    sgd_numbers = [*lr, *["float32"] * 3, *["boolean"] * 3]
    adam_numbers = [*lr, *["float32"] * 7, *["boolean"] * 3]
    steps = []
    for dtype in DTYPES:
        x = (dtype, 1)
        steps += [
            (f"sgd naive {dtype}", sgd_naive_kernel, [x] * 3 + sgd_numbers),
            (f"adam naive {dtype}", adam_naive_kernel, [x] * 5 + [rate] + adam_numbers),
            (f"sgd fused {dtype}", sgd_fused_kernel, [x, table, table, "int64", *sgd_numbers]),
            (
                f"adam fused {dtype}", adam_fused_kernel,
                [x, table, table, ticket, *["int64"] * 3, *adam_numbers],
            ),
        ]  # fmt: skip
    steps.append(("adam count", count_kernel, [rate]))
    for label, kernel, types in steps:
        yield f"optimizers {label}", kernel, types
        yield f"{STOPPABLE}{label}", GUARDED[kernel], [rate, *types]
    for dtype in ("int64", "uint32"):
        yield f"optimizers table fill {dtype}", fill_kernel, [(dtype, 1)] + ["int64"] * 19
    yield "optimizers table chunks", chunks_kernel, [table, table, "int64"]
