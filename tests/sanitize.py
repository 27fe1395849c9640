"""NVIDIA's compute-sanitizer on our kernels, and beside our own sanitizer.

``python tests/sanitize.py`` runs every kernel variant under it. memcheck finds accesses out of
bounds and misaligned ones, racecheck finds hazards on shared memory. Exit status 0 when both are
clean.

``python tests/sanitize.py cases`` runs the planted bugs of `course_lib.simulator.cases` that one of
its tools can see, and says where the two agree. Exit status 0 when they do on all of them.

Both need a GPU and the CUDA toolkit's `compute-sanitizer`.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
ERROR_STATUS = 9  # of a run in which compute-sanitizer found something
# Odd, tiny and misaligned on purpose: this is where a guard is missing.
SIZES = (1, 3, 127, 1000, 4099)
IMAGES = (
    (1, 1, 1, 1), (2, 3, 5, 7), (1, 8, 12, 12), (3, 40, 9, 9), (1, 2, 95, 95), (1, 4, 150, 90),
)  # fmt: skip
ROWS = ((1, 1), (3, 37), (300, 5), (2, 2600), (1, 9001))  # rows and classes


def launch_everything():
    """Every variant, dtype and direction at every size, each array in memory of its own."""
    import torch

    from course_lib import cuda
    from course_lib.kernels import activation, cross_entropy, global_avg_pool
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

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for n_rows, n_classes in ROWS:
            logits = torch.randn(n_rows * n_classes + 1, device="cuda").to(dtype)
            logits = logits[1:].view(n_rows, n_classes)
            weight = torch.rand(n_classes, device="cuda").to(dtype)
            indices = torch.randint(n_classes, (n_rows,), device="cuda")
            # Probabilities that start on another boundary, and on the same.
            for target in (indices, logits.clone().softmax(1), logits):
                for options in ({}, dict(weight=weight, label_smoothing=0.1, reduction="none")):
                    for variant in cross_entropy.VARIANTS:
                        options["variant"] = variant
                        loss, *saved = cross_entropy.forward(logits, target, **options)
                        cross_entropy.backward(loss, logits, target, *saved, **options)
                        launches += 3

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


def compare_cases():
    """How many planted bugs compute-sanitizer misses that it can see, by what their cases say."""
    from course_lib.simulator.cases import CASES

    planted = [case for case in CASES.values() if case.kind is not None]
    seen = [case for case in planted if case.gpu_tool]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(_found_by_tool, seen))
    for case, hit in zip(seen, found, strict=True):
        verdict = "agree" if hit else "MISSED by compute-sanitizer"
        print(f"{case.name:38}{case.kind:24}{case.gpu_tool:12}{verdict}")
    for case in planted:
        if not case.gpu_tool:
            print(f"{case.name:38}{case.kind:24}{'-':12}not run: {case.gpu_reason}")
    print(f"{sum(found)} of {len(seen)} agree; {len(planted) - len(seen)} are none of its business")
    return len(seen) - sum(found)


def _found_by_tool(case):
    command = ["-m", "course_lib.simulator.cases", "--gpu", case.name]
    try:
        done = _under(case.gpu_tool, command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == ERROR_STATUS or " hazard" in done.stdout.replace("0 hazards", "")


def _under(name, arguments, **options):
    """Run Python with `arguments` under compute-sanitizer's tool `name`."""
    # Without PyTorch's cache every array is an allocation of its own, with ends that can be seen.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = ["compute-sanitizer", "--tool", name, "--error-exitcode", str(ERROR_STATUS)]
    return subprocess.run(
        [*command, sys.executable, *arguments], env=environment, cwd=ROOT, **options
    )


def main(arguments):
    if arguments == ["launch"]:
        return launch_everything()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        return 2
    if arguments == ["cases"]:
        return 1 if compare_cases() else 0
    worst = 0
    for name in TOOLS:
        print(f"== {name}", flush=True)
        worst = max(worst, _under(name, [__file__, "launch"]).returncode)
    return worst


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
