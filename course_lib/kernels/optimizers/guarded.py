"""Steps that are made only where a number in the GPU's memory is 0: what a `GradScaler` found.

Gradients that were scaled up for float16 may have become infinite, and then the step is left out.
The host would have to wait to know; in a captured CUDA graph it cannot. So each kernel of a step
has a twin that reads the number before all else. Where it is not 0, parameters, states and counts
stay as they are.
"""


from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.optimizers.adam_kernels import (
    adam_fused_kernel,
    adam_naive_kernel,
    count_kernel,
)
from course_lib.kernels.optimizers.sgd_kernels import sgd_fused_kernel, sgd_naive_kernel
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel


def _body(kernel):
    """What `kernel` does, for another kernel to call."""
    return cuda.jit(device=True)(kernel.py_func)


sgd_naive_step, sgd_fused_step = _body(sgd_naive_kernel), _body(sgd_fused_kernel)
adam_naive_step, adam_fused_step = _body(adam_naive_kernel), _body(adam_fused_kernel)
count_step = _body(count_kernel)


@cuda.jit
def sgd_naive_guarded_kernel(
    found_inf, parameter, gradient, buffer, rate, given, lr, momentum, keep, weight_decay, nesterov,
    maximize, first_step,
):  # fmt: skip
    if found_inf[0] == ZERO:
        sgd_naive_step(
            parameter, gradient, buffer, rate, given, lr, momentum, keep, weight_decay, nesterov,
            maximize, first_step,
        )  # fmt: skip


@cuda.jit
def sgd_fused_guarded_kernel(
    found_inf, like, table, chunks, length, rate, given, lr, momentum, keep, weight_decay, nesterov,
    maximize, first_step,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    if found_inf[0] == ZERO:
        sgd_fused_step(
            like, table, chunks, length, rate, given, lr, momentum, keep, weight_decay, nesterov,
            maximize, first_step,
        )  # fmt: skip


@cuda.jit
def adam_naive_guarded_kernel(
    found_inf, parameter, gradient, m, v, peak, step, rate, given, lr, log_beta1, log_beta2,
    weight1, beta2, weight2, eps, weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    if found_inf[0] == ZERO:
        adam_naive_step(
            parameter, gradient, m, v, peak, step, rate, given, lr, log_beta1, log_beta2, weight1,
            beta2, weight2, eps, weight_decay, decoupled, amsgrad, maximize,
        )  # fmt: skip


@cuda.jit
def count_guarded_kernel(found_inf, step):
    if found_inf[0] == ZERO:
        count_step(step)


@cuda.jit
def adam_fused_guarded_kernel(
    found_inf, like, table, chunks, ticket, length, n_rows, n_steps, rate, given, lr, log_beta1,
    log_beta2, weight1, beta2, weight2, eps, weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    if found_inf[0] == ZERO:
        adam_fused_step(
            like, table, chunks, ticket, length, n_rows, n_steps, rate, given, lr, log_beta1,
            log_beta2, weight1, beta2, weight2, eps, weight_decay, decoupled, amsgrad, maximize,
        )  # fmt: skip


#: Each kernel's twin.
GUARDED = {
    sgd_naive_kernel: sgd_naive_guarded_kernel,
    sgd_fused_kernel: sgd_fused_guarded_kernel,
    adam_naive_kernel: adam_naive_guarded_kernel,
    adam_fused_kernel: adam_fused_guarded_kernel,
    count_kernel: count_guarded_kernel,
}


def guarded(kernel, found_inf):
    """(the kernel to launch, what it is given before its own arguments)."""
    return (kernel, ()) if found_inf is None else (GUARDED[kernel], (found_inf,))
