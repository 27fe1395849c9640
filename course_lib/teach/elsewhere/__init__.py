"""One softmax in five languages for GPU kernels: lesson 22, and docs/elsewhere.md.

A file each, which imports its own language and needs none of the others. All have `softmax(x)`,
which takes and returns a NumPy array of float32 (rows, columns).

    source("Triton")          the kernel's text
    missing("Triton")         what it would take to run it here; "" where it runs
    softmax("Triton", x)      the result
    ptx((9, 0))               what the compilers make of it, for a chip that need not be here
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import course_lib


class Language(NamedTuple):
    """What a language is called, its file, and what it needs."""

    module: str
    #: Modules that have to be there, each with what installs it.
    needs: dict[str, str]
    #: Why its kernels don't run without a GPU; "" where they do.
    without_gpu: str = ""


_TORCH = {"torch": "pip install torch"}
_ONLY_ON_GPUS = "has no simulator, and there is no GPU"

LANGUAGES = {
    "numba.cuda": Language("in_numba_cuda", {}),
    "numba-cuda-mlir": Language(
        "in_numba_cuda_mlir",
        {"numba_cuda_mlir": "pip install 'numba-cuda-mlir[cu13]'"},
        _ONLY_ON_GPUS,
    ),
    "CUDA C++": Language(
        "in_cuda_cpp", {"cuda.bindings": "pip install 'numba-cuda[cu13]'"}, _ONLY_ON_GPUS
    ),
    "Triton": Language("in_triton", {"triton": "pip install triton"} | _TORCH),
    "cuTile": Language(
        "in_cutile", {"cuda.tile": "pip install 'cuda-tile[tileiras]'"} | _TORCH, _ONLY_ON_GPUS
    ),
}

#: What has to be there to compile without a GPU, of the languages that then give out PTX.
_GIVE_PTX = {
    "numba.cuda": ["numba_cuda"],
    "CUDA C++": ["cuda.bindings"],
    "Triton": ["triton"],
}


def source(name):
    """Return the kernel as the language's file has it, with its imports and constants."""
    file = Path(__file__).parent / f"{_find(name).module}.py"
    text = file.read_text(encoding="utf-8")
    return text.split('"""', 2)[2].split("\n\ndef softmax(")[0].strip()


def missing(name):
    """Return, as a sentence, what is missing to run the language's kernel here; "" for nothing."""
    language = _find(name)
    for module, command in language.needs.items():
        if not _is_there(module):
            return f"{name} does not run here: no module {module} ({command})."
    if language.without_gpu and course_lib.SIMULATED:
        return f"{name} does not run here: it {language.without_gpu}."
    return ""


def softmax(name, x):
    """Return the softmax of each row of x, computed by the language's kernel.

    Raises RuntimeError where `missing` names something.
    """
    if reason := missing(name):
        raise RuntimeError(reason)
    return _load(name).softmax(x)


def ptx(cc):
    """Return what the compilers make of the kernel, {language: PTX}, for a compute capability.

    Needs no GPU. Of the languages that give out PTX without one, those that are installed. They
    compile in a process of their own: where there is no GPU, the simulator stands here in the place
    of numba.cuda, and Triton's interpreter in that of its compiler. Triton comes twice: it compiles
    once more for addresses and numbers of columns that are multiples of 16.

    Raises RuntimeError with the last line of what went wrong.
    """
    code = f"from {__name__} import _print_ptx; _print_ptx({tuple(cc)})"
    others = {"COURSE_LIB_SIMULATOR": "0", "TRITON_INTERPRET": "0"}
    root = str(Path(course_lib.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | others | {"PYTHONPATH": path},
    )
    if done.returncode:
        raise RuntimeError(f"not compiled: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def _print_ptx(cc):
    """Print what `ptx` returns, as JSON."""
    found = {}
    for name, needed in _GIVE_PTX.items():
        if all(map(_is_there, needed)):
            found[name] = _load(name).ptx(cc)
    if "Triton" in found:
        found["Triton, multiples of 16"] = _load("Triton").ptx(cc, divisible=True)
    print(json.dumps(found))


def _find(name):
    if name not in LANGUAGES:
        raise ValueError(f"no language {name!r}: there are {', '.join(LANGUAGES)}")
    return LANGUAGES[name]


def _load(name):
    return importlib.import_module(f"{__name__}.{_find(name).module}")


def _is_there(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
