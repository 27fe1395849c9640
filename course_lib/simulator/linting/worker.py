"""The process in which `lint` compiles: the real numba.cuda, whatever the caller's is.

`lint` runs this file by its path, outside the package, so that nothing here imports the simulator.
Requests and answers are pickles, each after its length in 8 bytes, over the standard streams.
"""

import contextlib
import importlib
import marshal
import os
import pickle
import re
import runpy
import struct
import sys
import traceback
import types as python_types

#: Compiled for this chip: any later one has the same types, and spills alike.
CHIP = (9, 0)
#: What looks through a typed function; found by its path, as this file is.
Typed = runpy.run_path(os.path.join(os.path.dirname(__file__), "numba_types.py"))["Typed"]
_F64 = re.compile(r"\.f64\b")


# -- kernels from what `lint` sent ---------------------------------------------------------------


class Builder:
    """Rebuilds functions and the values they refer to."""

    def __init__(self, functions, lineinfo):
        from numba import cuda

        self.cuda, self.lineinfo = cuda, lineinfo
        self.functions, self.made, self.dispatchers = functions, {}, []
        self.missing = {}

    def function(self, number):
        """The rebuilt function, wrapped by `cuda.jit` if it was."""
        if number in self.made:
            return self.made[number]
        spec = self.functions[number]
        cells = [python_types.CellType() for _ in spec["closure"]]
        plain = python_types.FunctionType(
            marshal.loads(spec["code"]), {"__name__": spec["module"], "__builtins__": __builtins__},
            spec["name"], None, tuple(cells))
        plain.__module__, plain.__qualname__ = spec["module"], spec["qualname"]
        # A dispatcher looks at them when it is made.
        plain.__defaults__ = tuple(map(self.value, spec["defaults"])) or None
        made = plain
        if spec["kind"] is not None:
            made = self.cuda.jit(device=spec["kind"] == "device", lineinfo=self.lineinfo,
                                 **spec["options"])(plain)
            self.dispatchers.append(made)
        self.made[number] = made  # before its globals: functions may call each other
        for name, value in spec["globals"].items():
            try:
                plain.__globals__[name] = self.value(value)
            except Exception as error:
                self.missing[name] = f"{type(error).__name__}: {error}"
        for cell, value in zip(cells, spec["closure"], strict=True):
            cell.cell_contents = self.value(value)
        return made

    def value(self, spec):
        """The value that `lint` described."""
        kind, *what = spec
        if kind == "function":
            return self.function(*what)
        if kind == "module":
            return importlib.import_module(*what)
        if kind == "attribute":
            found = importlib.import_module(what[0])
            for part in what[1].split("."):
                found = getattr(found, part)
            return found
        return pickle.loads(*what)


def argument_type(spec):
    """The numba type of an argument described by `lint`."""
    from numba import from_dtype
    from numba.cuda import types

    kind, *what = spec
    if kind == "array":
        dtype, ndim, layout, read_only = what
        element = getattr(types, dtype) if isinstance(dtype, str) else from_dtype(dtype)
        return types.Array(element, ndim, layout, readonly=read_only)
    if kind == "tuple":
        return types.Tuple.from_types(tuple(map(argument_type, what[0])))
    return getattr(types, what[0])


# -- compiling -----------------------------------------------------------------------------------


def compile_kernel(kernel, argument_types, options, lineinfo):
    """(typed function, PTX, what the assembler said) of a kernel, without a GPU."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda import dispatcher, types
    from numba.cuda.compiler import compile_cuda, kernel_fixup
    from numba.cuda.cudadrv import driver

    # numba-cuda asks the GPU for its chip when a kernel calls a device function.
    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=CHIP)
    registers = options.get("max_registers")
    fastmath = bool(options.get("fastmath"))
    typed = compile_cuda(kernel.py_func, types.void, argument_types, lineinfo=lineinfo,
                         fastmath=fastmath, nvvm_options={"fastmath": fastmath, "opt": 3},
                         cc=CHIP, max_registers=registers)
    library = typed.library
    function = library.get_function(typed.fndesc.llvm_func_name)
    library._entry_name = function.name
    kernel_fixup(function, False)
    ptx = library.get_asm_str(cc=CHIP)
    if library._linking_files:  # they may need a GPU's driver; what they spill is not ours
        return typed, ptx, ""
    # As the library would link itself, but with an assembler that talks.
    library.needs_cudadevrt = library.use_cooperative
    linker = driver._Linker(max_registers=registers, cc=CHIP)
    library._link_all(linker, CHIP)
    # numba-cuda compiles this function from CUDA C++ for a launch. It has no part in spills.
    stubs = [ObjectCode.from_ptx(stub.encode()) for stub in stubs_of(ptx, dispatcher.reshape_funcs)]
    talking = Linker(*linker._object_codes, *stubs, options=LinkerOptions(
        arch="sm_{}{}".format(*CHIP), verbose=True, max_register_count=registers))
    talking.link("cubin")
    return typed, ptx, talking.get_info_log()


def stubs_of(ptx, names):
    """PTX that defines as empty what a module only declares, of the functions called so."""
    head = "\n".join(re.findall(r"^\.(?:version|target|address_size).*$", ptx, re.MULTILINE))
    declared = re.findall(r"^\.extern \.func([^;]*?\b(\w+)\s*\([^;]*?\))\s*;", ptx, re.MULTILINE)
    return [f"{head}\n.visible .func{text}\n{{\nret;\n}}\n" for text, name in declared
            if name in names]


def double_lines(ptx, code):
    """{(filename, line)} of the instructions that work in float64.

    Where the PTX tells no lines, all are put down to the first one of the kernel.
    """
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))
    place, found = None, set()
    if not re.search(r"^\s*\.loc\b", ptx, re.MULTILINE):
        place = os.path.basename(code.co_filename), code.co_firstlineno
    for line in ptx.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = os.path.basename(files.get(at[1], "")), int(at[2])
        elif _F64.search(line) and not re.match(r"\s*(ld\.param|\.param|\.reg|//)", line):
            found.add(place)
    return found - {None}


# -- findings ------------------------------------------------------------------------------------


def lint(request, lineinfo=True):
    """The findings of a request: [(kind, filename, line, message)]."""
    builder = Builder(request["functions"], lineinfo)
    kernel = builder.function(0)
    argument_types = tuple(map(argument_type, request["arguments"]))
    options = request["functions"][0]["options"]
    typed, ptx, assembler = compile_kernel(kernel, argument_types, options, lineinfo)
    annotations = [(typed.type_annotation, kernel.py_func)]
    annotations += [(result.type_annotation, device.py_func) for device in builder.dispatchers
                    for result in device.overloads.values() if device is not kernel]
    doubles = double_lines(ptx, kernel.py_func.__code__)
    promotions, suspects, found = [], [], []
    for annotation, function in annotations:
        filename, looking = function.__code__.co_filename, Typed(
            annotation, function is kernel.py_func)
        promotions += [("float64-promotion", filename, *rest) for rest in looking.promotions()]
        suspects += [("float64-promotion", filename, *rest) for rest in looking.suspects()]
        doubles -= {(os.path.basename(filename), line) for line in looking.prints()}
        found += [("integer-width", filename, *rest) for rest in looking.widenings()]
    promotions = in_machine_code(promotions, doubles)
    # A comparison with a whole number is blamed last: it changes no result.
    promotions.sort(key=lambda each: bool(_COMPARES.match(each[-1])))
    meant = any(Typed(annotation).asks_for_float64() for annotation, _ in annotations)
    if doubles and not promotions and not meant:
        code = kernel.py_func.__code__
        filename = code.co_filename
        promotions = [("float64-promotion", filename, code.co_firstlineno, words.format(name))
                      for name, kind in zip(code.co_varnames, argument_types, strict=False)
                      if (words := _ARGUMENTS.get(str(kind)))]
    if doubles and not promotions and not meant:
        promotions = in_machine_code(suspects, doubles)
    if doubles and not promotions and not meant:
        promotions = [("float64-promotion", filename, line,
                       _UNEXPLAINED.format("line" if line else "kernel"))
                      for base, line in sorted(doubles) if base == os.path.basename(filename)]
    found += promotions
    code = kernel.py_func.__code__
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler)
    if spill and (int(spill[1]) or int(spill[2])):
        registers = re.search(r"Used (\d+) registers", assembler)
        found.append(("spill", code.co_filename, code.co_firstlineno, (
            f"{spill[1]} bytes per thread are spilled: {registers[1]} registers are not enough, "
            f"and the rest goes to memory and back. Keep fewer values alive at once")))
    return list(dict.fromkeys(found))


_COMPARES = re.compile(r"`[^`]* ([<>]=?|[=!]=) [^`]*` is computed")
_ARGUMENTS = {wide: f"the argument `{{0}}` is a Python {kind}, which is {wide}, and so is what is "
                    f"computed with it. Pass np.{small}({{0}}), or convert it so in the kernel"
              for kind, wide, small in (("float", "float64", "float32"),
                                        ("complex", "complex128", "complex64"))}
_UNEXPLAINED = ("the machine code of this {} computes in float64, and nothing asks for it by "
                "name. Give constants and conversions as np.float32")


def in_machine_code(promotions, doubles):
    """Those of the promotions that cost something, each with the line to tell.

    What the compiler could do in float32 after all, such as a comparison, left no float64
    instruction at its line. (If it left some, but none at any of the lines, it has merged
    expressions, and all may have a part in it.)
    """
    there = [found for found in promotions
             if (os.path.basename(found[1]), found[2]) in doubles]
    kept = there if there or not doubles else promotions
    return [(kind, filename, line, message) for kind, filename, _, line, message in kept]


def place(error):
    """Where in the kernel, as numba's messages say it: not all of its errors know."""
    trace, found = error.__traceback__, None
    while trace is not None:
        # What numba was typing: a constraint, which knows its place in the source.
        values = trace.tb_frame.f_locals
        try:
            found = getattr(values.get("self"), "loc", None) or found
        except Exception:
            pass  # an object that asks a GPU for its attributes
        trace = trace.tb_next
    line = getattr(found, "line", None)
    return f"\nDuring: typing at {found.filename} ({line})" if line else ""


def answer(request):
    """("findings", …) or ("error", text)."""
    try:
        try:
            return "findings", lint(request)
        except Exception:
            # Some kernels, of large records for instance, compile without lines alone.
            with contextlib.suppress(Exception):
                return "findings", lint(request, lineinfo=False)
            raise
    except Exception as error:
        if type(error).__module__.startswith("numba"):
            text = str(error)
        else:
            text = "".join(traceback.format_exception(error)).replace("\0", "")
        return "error", text.rstrip() + place(error)


def main():
    """Answer requests until the other side closes the pipe."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the notebook
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    try:
        from numba import cuda  # noqa: F401 - a second of work, before the first request
    except Exception:
        pass  # the first answer tells
    while len(head := incoming.read(8)) == 8:
        (length,) = struct.unpack("<Q", head)
        request = pickle.loads(incoming.read(length))
        sys.path[:] = request.pop("path")
        reply = pickle.dumps(answer(request))
        outgoing.write(struct.pack("<Q", len(reply)) + reply)
        outgoing.flush()


if __name__ == "__main__":
    main()
