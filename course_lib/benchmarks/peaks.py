"""What a chip could compute at most, for kernels that its arithmetic limits.

A multiprocessor's products and additions in a clock cycle, times the highest clock: no kernel gets
past it, and few get near. From NVIDIA's tables of throughput in the CUDA C++ programming guide, and
from the architectures' white papers.
"""

from course_lib.runtime.host import device

#: Compute capability: {kind: multiply-adds of a multiprocessor in a cycle}. "fma" is float32
#: without tensor cores; the others are what tensor cores multiply.
FUSED_MULTIPLY_ADDS = {
    (7, 5): {"fma": 64, "float16": 512},
    (8, 0): {"fma": 64, "tf32": 512, "float16": 1024, "bfloat16": 1024},
    (8, 6): {"fma": 128, "tf32": 128, "float16": 512, "bfloat16": 512},
    (8, 9): {"fma": 128, "tf32": 256, "float16": 512, "bfloat16": 512},
    (9, 0): {"fma": 128, "tf32": 1024, "float16": 2048, "bfloat16": 2048},
}
#: Products of a tensor core that a product as exact as float32 takes.
SPLIT = 3


def peaks(index=0):
    """{kind: TFLOP/s} of GPU `index`; "split" is float32 in three TF32 products. Empty if unknown.

    A multiply-add counts as two operations.
    """
    found = device.properties(index)
    return peaks_of(found.compute_capability, found.multiprocessors, found.clock_khz)


def peaks_of(capability, multiprocessors, clock_khz):
    """`peaks` of a chip with these properties."""
    rates = FUSED_MULTIPLY_ADDS.get(tuple(capability), {})
    found = {
        kind: round(2 * rate * multiprocessors * clock_khz / 1e9, 1) for kind, rate in rates.items()
    }
    if "tf32" in found:
        found["split"] = round(found["tf32"] / SPLIT, 1)
    return found
