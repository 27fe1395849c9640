"""What the optimisers are given, checked: parameters, gradients, states, steps, `found_inf`."""

from course_lib.runtime.host import arrays

DTYPES = ("float32", "float16", "bfloat16")


def check_found(found_inf):
    """ArrayError unless `found_inf` is None or an array of one float32."""
    if found_inf is not None:
        arrays.require(found_inf, "found_inf", dtypes=("float32",))
        if arrays.size_of(found_inf) != 1:
            raise arrays.ArrayError(
                f"found_inf must have one element, not shape {tuple(found_inf.shape)}"
            )


def check_together(parameters, gradients, *states):
    """Raise unless each parameter is dense, and its gradient and states lie in memory as it does.

    states  pairs of a name and a list of arrays
    """
    for name, found in (("gradients", gradients), *states):
        if found is None or len(found) != len(parameters):
            n = "none" if found is None else len(found)
            raise ValueError(f"{len(parameters)} parameters need as many {name}, not {n}")
    for i, p in enumerate(parameters):
        arrays.require(p, f"parameters[{i}]", dtypes=DTYPES, writable=True)
        if not arrays.is_dense(p):
            raise arrays.ArrayError(
                f"parameters[{i}] must fill one stretch of memory; its shape {tuple(p.shape)} with "
                f"strides {arrays.strides_of(p)} has gaps"
            )
        for name, found in (("gradients", gradients), *states):
            x, dtype = found[i], arrays.dtype_name(p)
            writable = name != "gradients"
            arrays.require(x, f"{name}[{i}]", shape=p.shape, dtypes=(dtype,), writable=writable)
            if not arrays.same_layout(x, p):
                raise arrays.ArrayError(
                    f"{name}[{i}] must lie in memory as parameters[{i}] does; its strides are "
                    f"{arrays.strides_of(x)}, not {arrays.strides_of(p)}"
                )


def check_steps(steps, n):
    """Raise unless `steps` are `n` arrays of one float32 each."""
    if len(steps) != n:
        raise ValueError(f"{n} parameters need as many steps, not {len(steps)}")
    for i, step in enumerate(steps):
        arrays.require(step, f"steps[{i}]", dtypes=("float32",), writable=True)
        if arrays.size_of(step) != 1:
            raise arrays.ArrayError(f"steps[{i}] must have one element, not {tuple(step.shape)}")
