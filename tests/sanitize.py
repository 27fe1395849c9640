"""Run every kernel variant under NVIDIA's compute-sanitizer: ``python tests/sanitize.py``.

Needs a GPU and the CUDA toolkit's `compute-sanitizer`. memcheck finds accesses out of bounds and
misaligned ones, racecheck finds hazards on shared memory. Exit status 0 when both are clean.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
# Odd, tiny and misaligned on purpose: this is where a guard is missing.
SIZES = (1, 3, 127, 1000, 4099)
IMAGES = ((1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 12, 12), (3, 40, 9, 9), (1, 2, 95, 95), (1, 4, 150, 90))


def launch_everything():
    """Every variant, dtype and direction at every size, each array in memory of its own."""
    import torch

    from course_lib import cuda
    from course_lib.kernels import activation, global_avg_pool
    from course_lib.runtime import intrinsics
    from course_lib.runtime.launch import launch

    launches = 0
    for operation in activation.OPERATIONS.values():
        for variant in operation.VARIANTS:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for size in SIZES:
                    for start in (0, 1):
                        x = torch.randn(size + start, device="cuda").to(dtype)[start:]
                        y = operation.forward(x, variant=variant)
                        operation.backward(x, y, variant=variant)
                        launches += 2

    for layout in (torch.contiguous_format, torch.channels_last):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shape in IMAGES:
                x = torch.randn(shape, device="cuda").to(dtype, memory_format=layout)
                last = layout is torch.channels_last
                for variant in global_avg_pool.VARIANTS:
                    y = global_avg_pool.forward(x, variant=variant)
                for variant in global_avg_pool.BACKWARD_VARIANTS:
                    global_avg_pool.backward(y, shape[2:], channels_last=last, variant=variant)
                launches += 7

    @cuda.jit
    def block_kernel(x, y):
        scratch = cuda.shared.array(32, "float32")
        i = cuda.grid(1)
        value = intrinsics.block_sum(x[i], scratch)
        y[i] = value + intrinsics.block_max(x[i], scratch)

    for block in (32, 96, 1024):
        x = torch.randn(2 * block, device="cuda")
        launch(block_kernel, 2, block, x, torch.empty_like(x))
        launches += 1
    torch.cuda.synchronize()
    print(f"{launches} launches")


def main():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        return 2
    # Without PyTorch's cache every array is an allocation of its own, with ends that can be seen.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    worst = 0
    for name in TOOLS:
        print(f"== {name}", flush=True)
        command = [tool, "--tool", name, "--error-exitcode", "9"]
        command += [sys.executable, __file__, "launch"]
        worst = max(worst, subprocess.run(command, env=environment, cwd=ROOT).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(launch_everything() if sys.argv[1:] == ["launch"] else main())
