"""All-reduce: every rank gets the sum, whatever the length, and wrong kernels are found out."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, simulator
from course_lib.kernels import all_reduce as package
from course_lib.kernels.all_reduce import ALL_REDUCE, DTYPES, all_reduce
from course_lib.runtime.host.arrays import ArrayError

PLACE = "cpu" if SIMULATED else "cuda"
RUNGS = list(ALL_REDUCE)
FILES = Path(package.__file__).parent
needs_two = pytest.mark.skipif(
    SIMULATED or torch.cuda.device_count() < 2, reason="for two GPUs"
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """Blocks of few elements, so that a rank has several; and memory that no other test used."""
    monkeypatch.setattr(package, "LEAST_PART", 32)
    monkeypatch.setattr(package, "_kept", {})


def drawn(world, n, dtype="float32", seed=0):
    numbers = np.random.default_rng(seed).normal(size=(world, n)) * 1000
    return torch.from_numpy(numbers.astype(dtype)).to(PLACE)


def check(buffers, variant, expected=None):
    """All-reduce `buffers`, a tensor of (world, n) or a list, and hold it against float64."""
    before = np.stack([rank.cpu().numpy() for rank in buffers])
    truth = before.astype("float64").sum(0)
    all_reduce(buffers, variant=variant)
    after = [rank.cpu().numpy() for rank in buffers]
    assert all(rank.tobytes() == after[0].tobytes() for rank in after), "ranks differ"
    size = np.abs(before.astype("float64")).sum(0)
    eps = np.finfo(before.dtype).eps if before.dtype.kind == "f" else 0
    assert (np.abs(after[0] - truth) <= len(before) * eps * size).all()
    return after[0]


@settings(max_examples=40, deadline=None)
@given(
    world=st.integers(1, 8),
    n=st.integers(0, 40) | st.integers(0, 400),
    dtype=st.sampled_from(DTYPES),
    variant=st.sampled_from(RUNGS),
    offset=st.sampled_from([0, 1]),
    order=st.sampled_from(["forward", "reverse", "random"]),
    seed=st.integers(0, 2**31),
)
def test_random_lengths_and_worlds(world, n, dtype, variant, offset, order, seed):
    memory = drawn(1, world * n + offset, dtype, seed)[0]
    buffers = memory[offset:].view(world, n)  # off a boundary of 16 bytes: element by element
    with simulator.options(order=order, seed=seed):
        check(buffers, variant)


@pytest.mark.parametrize("variant", RUNGS)
@pytest.mark.parametrize("world, n", [(2, 301), (3, 1000), (8, 70), (5, 3)])
def test_every_order_of_blocks_gives_the_same_bits(world, n, variant):
    found = []
    for order in ("forward", "reverse", "random"):
        with simulator.options(order=order, seed=7):
            found.append(check(drawn(world, n), variant))
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


def test_the_sums_have_the_order_that_is_told():
    x = drawn(4, 16)
    parts = x.cpu().numpy().copy()
    gathered = check(x.clone(), "gather")
    assert gathered.tobytes() == (((parts[0] + parts[1]) + parts[2]) + parts[3]).tobytes()
    ring = check(x, "ring")
    for chunk in range(4):  # begins at rank `chunk`
        a, b, c, d = (parts[(chunk + k) % 4, 4 * chunk : 4 * chunk + 4] for k in range(4))
        assert ring[4 * chunk : 4 * chunk + 4].tobytes() == (((a + b) + c) + d).tobytes()


@pytest.mark.parametrize("variant", RUNGS)
def test_calls_of_all_sizes_follow_each_other(variant):
    """With the memory of the calls before, larger and smaller, and by either rung."""
    for n in (40, 900, 7, 900, 1):
        check(drawn(3, n, seed=n), variant)
        check(drawn(3, n, seed=n + 1), "ring")
    assert len(package._kept) == 1


@pytest.mark.parametrize("variant", RUNGS)
def test_a_list_of_arrays(variant):
    check([rank.clone().view(4, 25) for rank in drawn(3, 100)], variant)
    if SIMULATED:
        buffers = [rank.copy() for rank in drawn(3, 50).numpy()]
        expected = np.sum(buffers, axis=0, dtype="float64")
        all_reduce(buffers, variant=variant)
        np.testing.assert_allclose(buffers[2], expected, rtol=1e-5)


def test_numbers_that_are_not_finite():
    x = drawn(3, 40)
    x[0, 1], x[1, 2], x[0, 3], x[1, 3] = np.nan, np.inf, np.inf, -np.inf
    all_reduce(x)
    for rank in x.cpu().numpy():
        assert np.isnan(rank[[1, 3]]).all() and rank[2] == np.inf and np.isfinite(rank[4:]).all()


def test_int32_wraps_around():
    x = torch.full((2, 5), 2**30, dtype=torch.int32, device=PLACE)
    all_reduce(x)
    assert (x == -(2**31)).all()


@pytest.mark.parametrize("variant", RUNGS)
@pytest.mark.parametrize("world, n", [(2, 200), (3, 130), (8, 40)])
def test_sanitizer_finds_nothing(world, n, variant):
    with simulator.sanitize() as report:
        for seed in range(2):
            check(drawn(world, n, seed=seed), variant)
    assert not report, str(report)


@pytest.mark.parametrize("world, n", [(2, 256), (4, 512)])
def test_what_comes_in_from_others(world, n):
    """(world − 1)·n numbers for each rank, or 2·(world − 1)/world·n."""
    with simulator.trace() as trace:
        all_reduce(drawn(world, n), variant="gather")
    (others,) = (site for site in trace.sites if site.source == "array_at(buffers[q], n, buffer)[i]")
    assert others.bytes_asked == world * (world - 1) * n * 4
    with simulator.trace() as trace:
        all_reduce(drawn(world, n), variant="ring")
    stores = [site for site in trace.sites if site.source.startswith("store_vector")]
    kept = n * 4  # the sums, which each rank stores in its own buffer as well
    assert sum(site.bytes_asked for site in stores) == 2 * (world - 1) * n * 4 + kept


def test_errors_name_what_was_expected():
    x = drawn(3, 8)
    for error, buffers, message in (
        (ArrayError, x.half(), "buffers must be float32 or float64 or int32, not float16"),
        (ArrayError, x[0], r"buffers must have 2 dimensions, not shape \(8,\)"),
        (ArrayError, x[:, ::2], r"buffers must be contiguous; the strides are \(8, 2\)"),
        (ArrayError, [x[0], x[1, :4]], r"buffers\[1\] must have shape \(8,\), not \(4,\)"),
        (ArrayError, [x[0], x[1].double()], r"buffers\[1\] must be float32, not float64"),
        (ArrayError, [x[0], x[1], x[0]], r"buffers\[0\] and buffers\[2\] share memory"),
        (ArrayError, [x[0], x[:2, 0].expand(8, 2)[:, 0]], r"buffers\[1\] must be contiguous"),
        (ArrayError, [x[0], x[1].cpu().numpy()], r"buffers\[1\] is a ndarray, but buffers\[0\]"),
        (ValueError, [], "all_reduce takes 1 to 8 buffers, not 0"),
        (ValueError, drawn(9, 4), "all_reduce takes 1 to 8 buffers, not 9"),
    ):
        with pytest.raises(error, match=message):
            all_reduce(buffers)
    with pytest.raises(ValueError, match="unknown variant 'tree'; there are gather, ring"):
        all_reduce(x, variant="tree")


# ---- known-wrong kernels -----------------------------------------------------------------------

RAISE = """\
            raise_flag(right_flags, block * ROW + ARRIVED, steps + step + 1)
"""
WAIT = """\
            wait_for_flag(own_flags, block * ROW + ARRIVED, steps + step + 1)
"""
FIRST_STEP = """\
            if step == 0:
"""
#: What is wrong -> (file, right code, wrong code, how it shows).
WRONG = {
    "nobody waits": ("ring", WAIT, "", "race"),
    "the flag is raised before the data is written": (
        "ring", FIRST_STEP, RAISE + FIRST_STEP, "race"),
    "the flag is raised when thread 0 has written": (
        "memory", "    cuda.syncthreads()\n    if cuda.threadIdx.x == 0:\n        store_release",
        "    if cuda.threadIdx.x == 0:\n        store_release", "race"),
    "the flag is raised without a fence": (
        "memory", "store_release(flags, i, value)", "flags[i] = value", "race"),
    "thread 0 alone waits": (
        "memory", "            pass\n    cuda.syncthreads()", "            pass", "race"),
    "the flag of the left neighbour's neighbour": (
        "ring", "right_flags = array_at(all_flags[right]",
        "right_flags = array_at(all_flags[(rank + 2) % world]", "race"),
    "steps are counted from 0 in each call": (
        "ring", "steps = own_flags[block * ROW + STEPS]", "steps = 0", "race"),
    "steps are not counted on": ("ring", "= steps + 2 * (world - 1)", "= steps", "race"),
    "one slot for all steps": ("ring", "slot = step * chunk + block", "slot = block", "race"),
    "the chunk is one too far": ("ring", "2 * world - step)", "2 * world - step + 1)", "sum"),
    "no all-gather": ("ring", "range(2 * (world - 1)):", "range(world - 1):", "sum"),
    "one step too few": ("ring", "range(2 * (world - 1)):", "range(2 * world - 3):", "sum"),
    "what has come in is not added": (
        "ring", "received[r + k] + source[s + k]", "source[s + k]", "sum"),
    "the flag is never raised": ("ring", RAISE, "", "deadlock"),
    "one flag is not raised": (
        "ring", RAISE, f"            if rank != 1:\n    {RAISE}", "deadlock"),
    "nobody meets before the buffers are read": (
        "gather", "    meet(flags, all_flags, rank, shares.world, row, meetings + 1)\n", "", "race"),
    "nobody meets before the buffers are replaced": (
        "gather", "    meet(flags, all_flags, rank, shares.world, row, meetings + 2)\n", "", "race"),
    "meetings are not counted on": ("gather", "= meetings + 2\n", "= meetings\n", "race"),
    "the own buffer is left out": ("gather", "range(1, shares.world)", "range(2, shares.world)",
                                   "sum"),
}  # fmt: skip


def wrong_kernel(file, right, wrong, folder):
    """The kernel of `file`, or the ring's, with `right` replaced by `wrong` once."""
    modules = {}
    for name in dict.fromkeys((file, "ring") if file == "memory" else (file,)):
        text = (FILES / f"{name}.py").read_text(encoding="utf-8")
        if name == file:
            assert text.count(right) == 1, f"{text.count(right)} times in {file}.py: {right}"
            text = text.replace(right, wrong)
        text = text.replace("course_lib.kernels.all_reduce.memory", "wrong_memory") if (
            file == "memory" and name == "ring") else text  # fmt: skip
        path = folder / f"wrong_{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        modules[name] = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = modules[name]
        spec.loader.exec_module(modules[name])
    if file == "gather":
        return modules[file].gather_kernel
    return modules["ring"].ring_kernel_of(vectors=False)


@pytest.mark.skipif(not SIMULATED, reason="races, and a GPU that waits forever")
@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_found(fault, tmp_path, monkeypatch):
    file, right, wrong, shows = WRONG[fault]
    kernel = wrong_kernel(file, right, wrong, tmp_path)
    variant = "gather" if file == "gather" else "ring"
    if variant == "ring":
        monkeypatch.setattr(package, "RING_KERNELS", {False: kernel, True: kernel})
    else:
        monkeypatch.setattr(package.gather, "gather_kernel", kernel)
    right_sums = []
    with simulator.sanitize() as report:
        for seed in range(2):
            x = drawn(3, 40, seed=seed)
            truth = x.double().sum(0)
            all_reduce(x, variant=variant)
            right_sums.append(bool(((x - truth).abs() < 0.01).all()))
    kinds = {finding.kind for finding in report.findings}
    print(kinds, right_sums, report)
    if shows == "sum":
        assert not all(right_sums)
    else:
        assert any(shows in kind for kind in kinds), kinds
