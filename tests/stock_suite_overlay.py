"""Put our simulator under numba-cuda's test suite, in a process of its own.

The stock simulator stays loaded: it makes the rest of `numba.cuda` importable without a GPU, and
the tests use parts of it (`testing`, `config`, `types`). Every public name that our `numba.cuda`
has takes the place of the stock one, so that the kernels of the tests are ours.
"""

import importlib
import os
import types
import unittest

import stock_suite

# Submodules whose names the tests import one by one.
SUBMODULES = ("random", "cudadrv.devicearray", "libdevice", "args")


def apply():
    """Replace the stock simulator's names by ours and let the tests run that only it can't.

    Returns a function that tells how many kernels our simulator has launched so far.
    """
    replace_simulator()
    lift_skips(importlib.import_module("numba.cuda.testing"))
    importlib.import_module("numba.cuda.tests.support").rtsys = NoAllocations
    return count_launches()


def replace_simulator():
    """Put the names of our `numba.cuda` over the stock ones."""
    # `course_lib` itself must not hook `numba.cuda`: the tests need the stock package around it.
    os.environ["COURSE_LIB_SIMULATOR"] = "0"
    stock = importlib.import_module("numba.cuda")
    simulator = importlib.import_module("course_lib.simulator")
    replace(stock, simulator.cuda)
    for name in SUBMODULES:
        ours = simulator.cuda
        for part in name.split("."):
            ours = getattr(ours, part, None)
        if ours is not None:
            replace(importlib.import_module(f"numba.cuda.{name}"), ours)


class NoAllocations:
    """Stands in for numba's allocation counters, which some test classes read before each test."""

    @staticmethod
    def memsys_enable_stats():
        pass

    memsys_disable_stats = memsys_enable_stats

    @staticmethod
    def get_allocation_stats():
        return types.SimpleNamespace(alloc=0, free=0, mi_alloc=0, mi_free=0)


def fill_names(module):
    """Define what a test module imports only without a simulator: the bfloat16 functions."""
    if module.__name__.endswith("test_bfloat16"):
        simulator = importlib.import_module("course_lib.simulator")
        for name, value in vars(simulator.cuda.bf16).items():
            if not name.startswith("_"):
                vars(module).setdefault(name, value)


def replace(stock, ours):
    """Copy the public names of `ours` over those of `stock`, except whole modules."""
    for name in dir(ours):
        if not name.startswith("_"):
            value = getattr(ours, name)
            if not isinstance(value, types.ModuleType):
                setattr(stock, name, value)


def lift_skips(testing):
    """Run what the stock simulator can't, except for what no simulator has (see the data file)."""
    kept = stock_suite.kept_reasons()

    def skip_on_cudasim(reason):
        return unittest.skip(reason) if reason in kept else lambda test: test

    testing.skip_on_cudasim = skip_on_cudasim


def count_launches():
    """Make our scheduler count; returns the function that reads the counter."""
    launching = importlib.import_module("course_lib.simulator.engine.launching")
    run, launches = launching.Launch.run, []

    def counted(launch):
        launches.append(launch.name)
        return run(launch)

    launching.Launch.run = counted
    return launches.__len__
