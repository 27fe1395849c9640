"""From a `@cuda.jit` kernel and argument types to machine code, with or without a GPU.

numba-cuda does the work; this module calls the parts of it that need no GPU, so that a laptop
can compile for a chip it doesn't have, and keeps the result on disk. Numba's own cache keys on
the time stamp of one file and so misses a changed device function in another; here the key is
everything the kernel's source reaches (`fingerprint`), with the versions and options used.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import inspect
import json
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from types import SimpleNamespace

from course_lib.runtime.compile import cache
from course_lib.runtime.compile.cache import CACHE_VARIABLE, cache_folder
from course_lib.runtime.compile.fingerprint import fingerprint

__all__ = [
    "CACHE_VARIABLE", "Compiled", "cache_folder", "cache_key", "case_key", "compile_kernel",
    "compiled_by", "is_current", "ptx", "source_key", "survey",
]  # fmt: skip

# What numba-cuda adds to the options that a kernel was given, and the simulator does not.
_OPTIONS = {
    "debug": 0, "lineinfo": False, "opt": True, "link": (), "fastmath": False, "device": False,
    "inline": "never", "forceinline": False, "extensions": [], "launch_bounds": None, "lto": True,
    "shared_memory_carveout": None,
}  # fmt: skip

_lock = threading.RLock()


@dataclass(frozen=True)
class Compiled:
    """Machine code of one kernel for one list of argument types and one compute capability.

    `registers` are per thread; `stack_bytes` per thread is what did not fit in registers
    (spills and arrays indexed at run time); `shared_bytes` is the static amount per block.
    """

    name: str
    cubin: bytes
    registers: int
    stack_bytes: int
    shared_bytes: int
    cooperative: bool
    signature: str
    compute_capability: tuple[int, int]
    key: str


def cache_key(kernel, argtypes, cc):
    """The name under which `compile_kernel` keeps its result."""
    return _key(fingerprint(kernel), _texts(argtypes), cc, _options(kernel))


def is_current(head, digest):
    """Whether a kernel in the cache is what compiling it today would give.

    head    what the cache says of it (`cache.Entry.head`)
    digest  the `fingerprint` of the kernel as it is today
    """
    wanted = _key(digest, head["argtypes"], head["compute_capability"], head["options"])
    return wanted == head["key"]


def source_key(digest, argtypes, options):
    """What a specialisation is made of, the same on a GPU and in the simulator.

    digest    the `fingerprint` of the kernel
    argtypes  numba's types, or their names (`launch.type_names`)
    options   the kernel's `targetoptions`
    """
    options = sorted((name, repr(value)) for name, value in (_OPTIONS | options).items())
    return [digest, _texts(argtypes), options]


def case_key(source, by=None):
    """The name of a specialisation, from its `source_key` and from what compiles it.

    by  what `compiled_by` says; by default, what it says here
    """
    facts = [*source, by or compiled_by()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@functools.cache
def compiled_by():
    """What kernels are compiled by here: how, and the versions of what takes part."""
    python, *libraries = _versions()
    # Bytecode is the same in all releases of a Python.
    return [fingerprint(survey), python[:2], *libraries]


def _key(digest, argtypes, cc, options):
    facts = [digest, argtypes, cc, options, _versions(), cache.LAYOUT]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _texts(argtypes):
    return [_text(argtype) for argtype in argtypes]


def _text(argtype):
    """numba's name of a type; of a NamedTuple with its fields, whose order numba leaves out."""
    fields = getattr(argtype, "fields", None)
    return f"{argtype} of {', '.join(fields)}" if fields else str(argtype)


def _options(kernel):
    return sorted((name, repr(value)) for name, value in kernel.targetoptions.items())


@functools.cache
def _versions():
    # Python's own version matters: numba compiles bytecode.
    names = ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")
    found = [list(sys.version_info[:3])]
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append([name, importlib.metadata.version(name)])
    return found


def compile_kernel(kernel, argtypes, cc):
    """Compile `kernel` (a `@cuda.jit` dispatcher) for `argtypes` (numba types).

    `cc` is a compute capability such as (9, 0). Returns `Compiled`, from disk when the same
    kernel was compiled before. numba's typing errors are raised as they are.
    """
    key = cache_key(kernel, argtypes, cc)
    path = cache.path_of(key)
    if (found := cache.load(path)) is not None:
        head, cubin = found
        facts = {name: head[name] for name in Compiled.__annotations__ if name != "cubin"}
        chip = tuple(head["compute_capability"])
        return Compiled(cubin=cubin, **facts | {"compute_capability": chip})
    compiled, text = _compile(kernel, argtypes, cc, key)
    head = asdict(compiled) | _origin(kernel)
    head |= {"argtypes": _texts(argtypes), "options": _options(kernel)}
    del head["cubin"]
    cache.save(path, head, compiled.cubin, text)
    return compiled


def _origin(kernel):
    """Where the source of `kernel` is, for who lists the cache."""
    function = kernel.py_func
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    return {"module": function.__module__, "qualname": function.__qualname__, "file": file}


def _prepare(kernel, argtypes, cc):
    from numba.cuda import types
    from numba.cuda.compiler import compile_cuda, kernel_fixup
    from numba.cuda.cudadrv import nvvm

    options = kernel.targetoptions
    if options.get("link"):
        raise NotImplementedError("kernels that link other files can't be launched this way")
    fastmath = bool(options.get("fastmath"))
    with _pretend_device(cc):
        result = compile_cuda(
            kernel.py_func,
            types.void,
            tuple(argtypes),
            lineinfo=bool(options.get("lineinfo")),
            fastmath=fastmath,
            nvvm_options={"fastmath": fastmath, "opt": 3 if options.get("opt", True) else 0},
            cc=cc,
            max_registers=options.get("max_registers"),
        )
    library = result.library
    function = library.get_function(result.fndesc.llvm_func_name)
    library._entry_name = function.name
    kernel_fixup(function, False)
    nvvm.set_launch_bounds(function, options.get("launch_bounds"))
    return library, function.name


def _compile(kernel, argtypes, cc, key):
    # On a thread of its own, which has no callers: numba keeps errors that it has caught, with the
    # frames that they came through, and Python those that called these. So every array of a
    # launcher would stay until garbage is collected. Ctrl-C waits until the thread ends.
    with _lock, ThreadPoolExecutor(1) as thread:
        return thread.submit(_compiled, kernel, argtypes, cc, key).result()


def _compiled(kernel, argtypes, cc, key):
    """(`Compiled`, PTX text)."""
    library, name = _prepare(kernel, argtypes, cc)
    library.needs_cudadevrt = library.use_cooperative
    target = _target(library, cc)
    cubin = bytes(library.get_cubin(cc=target).code)
    text = library.get_asm_str(cc=target)  # made on the way to the cubin, and kept
    compiled = Compiled(
        name=name,
        cubin=cubin,
        **_resources(cubin, name),
        cooperative=bool(library.use_cooperative),
        signature=", ".join(map(str, argtypes)),
        compute_capability=tuple(cc),
        key=key,
    )
    return compiled, text


def ptx(kernel, argtypes, cc):
    """The PTX text of `kernel` for `argtypes` and `cc`. Links nothing and keeps nothing."""
    with _lock:
        library, _ = _prepare(kernel, argtypes, cc)
        return library.get_asm_str(cc=_target(library, cc))


def survey(kernel, argtypes, chips):
    """What `kernel` becomes on each of `chips` (compute capabilities), needing none of them.

    Yields (chip, resources, PTX text); resources are `registers`, `stack_bytes` and
    `shared_bytes` as in `Compiled`.
    """
    with _lock:
        library, name = _prepare(kernel, argtypes, chips[0])
        for chip in chips:
            target = _target(library, chip)
            cubin = bytes(library.get_cubin(cc=target).code)
            yield chip, _resources(cubin, name), library.get_asm_str(cc=target)


def _target(library, cc):
    """What to compile for: `cc`, or also what its chips have and later ones have not ("sm_90a").

    That is an instruction of `intrinsics.warpgroup`.
    """
    if tuple(cc) == (9, 0) and any("wgmma." in text for text in library.llvm_strs):
        return (*cc, "a")
    return cc


@contextlib.contextmanager
def _pretend_device(cc):
    # numba-cuda asks the current GPU for its compute capability when a kernel calls a device
    # function, although it is told which one to compile for.
    from numba.cuda import dispatcher

    original = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = original


def _resources(cubin, name):
    """Registers, stack and static shared memory, read from the cubin (an ELF file)."""
    sections, names = _elf_sections(cubin)
    symbols = _symbol_names(cubin, sections, names)
    # Attribute codes of .nv.info, as `cuobjdump -elf` names them.
    wanted = {0x2F: "registers", 0x11: "stack_bytes"}
    found = {"registers": 0, "stack_bytes": 0, "shared_bytes": 0}
    for section, label in zip(sections, names, strict=True):
        if label == f".nv.shared.{name}":
            found["shared_bytes"] = section[5]
        if label != ".nv.info":
            continue
        position, end = section[4], section[4] + section[5]
        while position < end:
            kind, code, size = struct.unpack_from("<BBH", cubin, position)
            # Kind 4 carries `size` bytes; the others hold their value in the size field.
            if kind == 4 and code in wanted and size == 8:
                symbol, value = struct.unpack_from("<II", cubin, position + 4)
                if symbols[symbol] == name:
                    found[wanted[code]] = value
            position += 4 + (size if kind == 4 else 0)
    return found


def _elf_sections(cubin):
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file, so not a cubin")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, number, strings = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(number)]
    base = sections[strings][4]
    return sections, [_string(cubin, base + section[0]) for section in sections]


def _symbol_names(cubin, sections, names):
    table = sections[names.index(".symtab")]
    base = sections[table[6]][4]
    starts = range(table[4], table[4] + table[5], table[9])
    return [_string(cubin, base + struct.unpack_from("<I", cubin, start)[0]) for start in starts]


def _string(data, start):
    return data[start : data.index(b"\0", start)].decode()
