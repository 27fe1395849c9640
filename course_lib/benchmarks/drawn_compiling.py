"""Compile, in all processes that there is room for, the kernels that drawn problems launch.

    python -m course_lib bench --drawn 64 --compile-only

needs no GPU, and leaves them in the cache of kernels, so that a GPU is not kept waiting for the
compiler. A process in the simulator plans the launches; one with the real numba.cuda compiles.
"""

import concurrent.futures
import json
import multiprocessing
import os
import subprocess
import sys
import time

import torch

import course_lib
from course_lib.benchmarks import drawn, launches
from course_lib.benchmarks.case import Make
from course_lib.benchmarks.drawn_problems import OPERATIONS, kind_of, problem
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.device import SIMULATOR_VARIABLE
from course_lib.runtime.host.launch import argument_type, planning, type_names


def run(facts, count, names=None, seed=drawn.SEED, jobs=None):
    """Compile all of them for a device; returns how many there are.

    facts  what `bench.device_facts` says of the device, which need not be here
    """
    wanted = json.dumps([facts, count, names or list(OPERATIONS), seed, jobs or os.cpu_count()])
    return int(_in_process("0", wanted))


def _in_process(simulated, wanted):
    command = [sys.executable, "-m", "course_lib.benchmarks.drawn_compiling", wanted]
    env = os.environ | {SIMULATOR_VARIABLE: simulated}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def planned(facts, count, names, seed):
    """The keys of the specialisations that all problems launch."""
    found, chip = set(), launches.chip_of(facts)
    for name in names:
        for number in range(count):
            kind, each = kind_of(name, number), problem(name, number, seed)
            with drawn.settings(kind.tf32), torch.no_grad(), planning(chip) as made:
                one = drawn.Buffers(each, kind, Make("cpu", empty=True))
                for given in each.passes.values():
                    one.call(each.ours, tuple(name for name in given if name in each.inputs))
            for kernel, _, _, args, options in made:
                found.add(_key(kernel, type_names(args, options["flat"])))
    return sorted(found)


def _key(kernel, types):
    digest = launches.fingerprint_of(kernel)
    return compiler.case_key(compiler.source_key(digest, types, kernel.targetoptions))


_chosen = []  # [(kernel, types)]: a forked process has the kernels, which can't be sent


def _compile(index, capability):
    compiler.compile_kernel(*_chosen[index], capability)


def compile_planned(keys, facts, names, jobs):
    """Compile the specialisations that have these keys. Returns how many they are."""
    for module in {OPERATIONS[name][-1] for name in names}:
        for _, kernel, parts in module.specialisations():
            types = [argument_type(part) for part in parts]
            if _key(kernel, types) in keys:
                _chosen.append((kernel, types))
    began, capability = time.monotonic(), tuple(facts["compute_capability"])
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        futures = [pool.submit(_compile, index, capability) for index in range(len(_chosen))]
        try:
            for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
                future.result()
                if done % 50 == 0 or done == len(futures):
                    seconds = time.monotonic() - began
                    print(f"{done} of {len(futures)} in {seconds:.0f} s", file=sys.stderr)
        except BaseException:  # Ctrl-C too: what waits is not compiled, what is done is kept
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(_chosen)


def main(text):
    """What one of the two processes does; its answer is printed."""
    facts, count, names, seed, jobs = json.loads(text)
    if course_lib.SIMULATED:
        print(json.dumps(planned(facts, count, names, seed)))
    else:
        keys = set(json.loads(_in_process("1", text)))
        print(compile_planned(keys, facts, names, jobs))


if __name__ == "__main__":
    main(sys.argv[1])
