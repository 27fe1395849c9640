"""What a process's first call costs, with nothing compiled yet and with the cache on disk filled.

For each round a folder is made, empty; a process makes one call of each operation and ends (cold:
it compiles), then a second one does the same (warm: it loads). Timed is the first call alone, until
its result is there, in a process that has imported all and used the GPU already. Beside it, the
same for torch.compile, whose own caches are just as empty and just as full.

Without a GPU, `first_calls(..., compile_only=True)` compiles for sm_90 and launches nothing.
"""

import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from course_lib import bench
from course_lib.kernels import squeeze_excite
from course_lib.kernels.softmax import softmax
from course_lib.runtime.compile import cache, compiler

NAME = "kernel_cache.first_call"
COMMAND = "python -m course_lib bench kernel_cache --record"
SE_SHAPE, SOFTMAX_SHAPE = (8, 144, 95, 95), (8192, 4096)
SQUEEZED = 6
COLD, WARM = "cold", "warm"
OPERATIONS = ("squeeze_excite.forward", "softmax.forward")
PEERS = ("torch.compile of SqueezeExcitation",)
CHIP = (9, 0)  # compiled for where there is no GPU
LONGEST = 300  # seconds that a process may take
ROOT = Path(__file__).resolve().parent.parent.parent
#: Every cache that one of the candidates keeps: a variable, and its folder in a round's.
CACHES = {
    cache.CACHE_VARIABLE: "course_lib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "driver",
}


def run(*, rounds=3, progress=lambda cases: cases):
    """One record, of host times: rows for each operation and peer, cold and warm."""
    samples = {}
    for _ in progress(range(rounds)):
        for what in (*OPERATIONS, *PEERS):
            for state, found in first_calls(what).items():
                samples.setdefault((what, state), []).append(found["microseconds"])
    return [_record(samples)]


def first_calls(what, *, compile_only=False):
    """{"cold": …, "warm": …}: what two processes, one after the other, have to say of `what`.

    Each is {"microseconds": of the first call, "files": in our cache afterwards}. Raises
    RuntimeError with what a process printed if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        return {state: _child(what, folder, compile_only) for state in (COLD, WARM)}


def _child(what, folder, compile_only):
    environment = os.environ | {name: os.path.join(folder, sub) for name, sub in CACHES.items()}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    if compile_only:
        environment["COURSE_LIB_SIMULATOR"] = "0"  # the real compiler, though nothing can run
    command = [sys.executable, "-m", __name__, what, *["--compile-only"] * compile_only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode:
        raise RuntimeError(f"the first call of {what} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _record(samples):
    timings = {case: bench.Timing.of(found) for case, found in samples.items()}
    rows = []
    for (what, state), timing in timings.items():
        cold = timings[what, COLD].microseconds
        rows.append({
            "label": f"{what}, {state}",
            "kind": "ours" if what in OPERATIONS else "peer",
            "microseconds": round(timing.microseconds, 1),
            "quartiles": [round(quartile, 1) for quartile in timing.quartiles],
            "speedup": round(cold / timing.microseconds, 2),
        })  # fmt: skip
    record = bench.host_record(NAME, SE_SHAPE, "float32", rows, kernel_hashes()[NAME], COMMAND)
    return record | {"shapes": {OPERATIONS[0]: list(SE_SHAPE), OPERATIONS[1]: list(SOFTMAX_SHAPE)}}


def kernel_hashes():
    """{name of the record: hash of the kernels compiled, and of what keeps and finds them}."""
    rungs = squeeze_excite.FORWARD["two_pass"], softmax.FORWARD["registers"]
    kernels = [kernel for rung in rungs for kernel in rung.kernels]
    # By their text: what they refer to differs between a GPU and the simulator.
    host = map(inspect.getsource, (compiler.compile_kernel, cache.save, cache.load, cache._read))
    texts = [bench.kernel_hash(kernels), *host]
    return {NAME: hashlib.sha256("\n".join(texts).encode()).hexdigest()}


# --------------------------------------------------------------------- in the child process


def _timed(call):
    """µs of one call, and how many kernels are in our cache after it."""
    start = time.perf_counter()
    call()
    elapsed = time.perf_counter() - start
    return {"microseconds": elapsed * 1e6, "files": len(cache.entries())}


def _first_call(what):
    """A function of no arguments that makes the first call of `what` and waits for its result."""
    import torch

    x = torch.randn(SOFTMAX_SHAPE if what == "softmax.forward" else SE_SHAPE, device="cuda")
    if what == "softmax.forward":
        function = softmax.forward
    else:
        from torchvision.ops import SqueezeExcitation

        block = SqueezeExcitation(SE_SHAPE[1], SQUEEZED, torch.nn.SiLU).cuda()
        weights = [p.detach() for layer in (block.fc1, block.fc2) for p in layer.parameters()]
        if what in PEERS:
            block(x)  # cuBLAS and cuDNN are not what is measured
            function = torch.compile(block)
        else:
            function = lambda x: squeeze_excite.forward(x, *weights)  # noqa: E731
    torch.cuda.synchronize()

    def call():
        with torch.no_grad():
            function(x)
        torch.cuda.synchronize()

    return call


def _compilation(what):
    """As `_first_call`, but compiling some kernels of `what` is all that is done."""
    from course_lib.kernels import softmax as softmax_package
    from course_lib.runtime.host.launch import argument_type

    module = softmax_package if what == "softmax.forward" else squeeze_excite
    word = "online" if what == "softmax.forward" else "two_pass"
    chosen = [
        (kernel, [argument_type(p) for p in parts])
        for label, kernel, parts in module.specialisations()
        if word in label and label.startswith(what) and "float32" in label
    ][:2]
    if not chosen:
        raise ValueError(f"{what} has no specialisation of the rung {word}")

    def call():
        for kernel, types in chosen:
            compiler.compile_kernel(kernel, types, CHIP)

    return call


def main(arguments):
    """What the child process does: print as JSON what the first call of an operation costs."""
    what, *options = arguments
    call = _compilation(what) if options == ["--compile-only"] else _first_call(what)
    print(json.dumps(_timed(call)))


if __name__ == "__main__":
    main(sys.argv[1:])
