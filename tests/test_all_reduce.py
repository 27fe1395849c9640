"""All-reduce: every rank gets the sum, whatever the length, and wrong kernels are found out."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, bench, simulator
from course_lib.kernels import all_reduce as package
from course_lib.kernels.all_reduce import ALL_REDUCE, DTYPES, all_reduce
from course_lib.runtime.host.arrays import ArrayError

PLACE = "cpu" if SIMULATED else "cuda"
RUNGS = list(ALL_REDUCE)
FILES = Path(package.__file__).parent


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


@settings(max_examples=25, deadline=None)
@given(
    world=st.integers(1, 8),
    n=st.integers(0, 40) | st.integers(0, 200),
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
    (memory,) = package._kept.values()
    assert memory.n_elements % 4 == 0  # each inbox begins on a 16-byte boundary, as vectors must


@pytest.mark.parametrize("variant", RUNGS)
def test_a_list_of_arrays(variant):
    check([rank.clone().view(4, 25) for rank in drawn(3, 100)], variant)
    if SIMULATED:
        buffers = [rank.copy() for rank in drawn(3, 50).numpy()]
        expected = np.sum(buffers, axis=0, dtype="float64")
        all_reduce(buffers, variant=variant)
        np.testing.assert_allclose(buffers[2], expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("variant", RUNGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_for_each_rank(dtype, variant):
    """The sums are right, and have the bits that one GPU gives them."""
    for n in (1, 1000, 100_003, 1 << 22):
        x = drawn(2, n, dtype)
        apart = check([x[0].to("cuda:0"), x[1].to("cuda:1")], variant)
        assert check(x, variant).tobytes() == apart.tobytes()


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
    x = drawn(world, n)
    with simulator.trace() as trace:
        all_reduce(x, variant="gather")
    (others,) = (site for site in trace.sites if "buffers[q]" in site.source)
    assert others.lanes == world * (world - 1) * n
    with simulator.trace() as trace:
        all_reduce(x, variant="ring")
    stores = [site for site in trace.sites if site.source.startswith("store_vector")]
    kept = n  # the sums, which each rank stores in its own buffer as well
    assert sum(site.lanes for site in stores) * 4 == 2 * (world - 1) * n + kept


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

RAISE = """
            raise_flag(right_flags, block * ROW + ARRIVED, steps + step + 1)"""
WAIT = """
            wait_for_flag(own_flags, block * ROW + ARRIVED, steps + step + 1)"""
RACE = "race-between-blocks"
MEET = "\n    meet(flags, all_flags, rank, shares.world, row, meetings + 2)"
BARRIER = "    cuda.syncthreads()\n    if cuda.threadIdx.x == 0:\n        store_release"
#: What is wrong -> (file, how it shows, pairs of what is replaced by what).
WRONG = {
    "nobody waits": ("ring", RACE, (WAIT, "")),
    "the flag is raised before the data is written": (
        "ring",
        RACE,
        (RAISE, ""),
        ("\n            if step == 0:", f"{RAISE}\\g<0>"),
    ),
    "the flag is raised when thread 0 has written": (
        "memory",
        RACE,
        (BARRIER, BARRIER.partition("\n")[2]),
    ),
    "the flag is raised without a fence": (
        "memory",
        RACE,
        ("store_release(flags, i, value)", "flags[i] = value"),
    ),
    "thread 0 alone waits": ("memory", RACE, ("pass\n    cuda.syncthreads()", "pass")),
    "the flag of the left neighbour is raised": (
        "ring",
        RACE,
        ("all_flags[right]", "all_flags[(rank + 2) % world]"),
    ),
    "steps are counted from 0 in each call": (
        "ring",
        RACE,
        ("steps = own_flags[block * ROW + STEPS]", "steps = 0"),
    ),
    "steps are not counted on": ("ring", RACE, ("= steps + 2 * (world - 1)", "= steps")),
    "one slot for all steps": (  # a race, too, where ranks take other turns
        "ring",
        "sum",
        ("slot = step * chunk", "slot = 0"),
        ("slot - chunk", "slot"),
    ),
    "chunks go round the wrong way": ("ring", "sum", ("world - step)", "world + step)")),
    "gathered chunks are counted one off": (
        "ring",
        "sum",
        ("world - step)", "world - step + (1 if step >= world else 0))"),
    ),
    "no all-gather": ("ring", "sum", ("range(2 * (world - 1)):", "range(world - 1):")),
    "one step too few": ("ring", "sum", ("range(2 * (world - 1)):", "range(2 * world - 3):")),
    "what has come in is not added": ("ring", "sum", ("received[r + k] + ", "")),
    "the flag is never raised": ("ring", "deadlock", (RAISE, "")),
    "one rank does not raise its flag": (
        "ring",
        "deadlock",
        (RAISE, RAISE.replace("raise_flag", "if rank != 1: raise_flag")),
    ),
    "nobody meets before the buffers are replaced": ("gather", RACE, (MEET, "")),
    "meetings are not counted on": ("gather", RACE, ("= meetings + 2\n", "= meetings\n")),
    "a buffer is left out": ("gather", "sum", ("range(1, shares.world)", "range(2, shares.world)")),
}


def wrong_kernel(file, replaced, folder):
    """The kernel of `gather` or else of `ring`, with something in `file` replaced."""
    for name in ("memory", "gather" if file == "gather" else "ring"):
        text = (FILES / f"{name}.py").read_text(encoding="utf-8")
        for right, wrong in replaced if name == file else ():
            text, n = re.subn(re.escape(right), wrong, text)
            assert n, f"{file}.py has no {right}"
        text = text.replace("course_lib.kernels.all_reduce.memory", "wrong_memory")
        path = folder / f"wrong_{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module.gather_kernel if file == "gather" else module.ring_kernel_of(vectors=False)


@pytest.mark.skipif(not SIMULATED, reason="races, and a GPU that waits forever")
@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_found(fault, tmp_path, monkeypatch):
    file, shows, *replaced = WRONG[fault]
    kernel = wrong_kernel(file, replaced, tmp_path)
    if file == "gather":
        monkeypatch.setattr(package.gather, "gather_kernel", kernel)
    else:
        monkeypatch.setattr(package, "RING_KERNELS", {False: kernel, True: kernel})
    right = []
    with simulator.options(max_steps=20_000), simulator.sanitize() as report:
        for seed in range(2):  # some show only when flags have been raised before
            x = drawn(3, 40, seed=seed)
            truth = x.double().sum(0)
            all_reduce(x, variant="gather" if file == "gather" else "ring")
            right.append(bool(((x - truth).abs() < 0.01).all()))
    if shows == "sum":
        assert not all(right)
    else:
        assert shows in report.kinds(), str(report)
    if shows == "deadlock":
        lines = (FILES / "memory.py").read_text(encoding="utf-8").splitlines()
        line = 1 + next(i for i, text in enumerate(lines) if "while load_acquire" in text)
        sentence = (
            f"thread 0 of block 0 goes round the loop on line {line} for ever; let every round "
            "come nearer to its end, and if it waits for another thread, let that one run and "
            "write what it waits for"
        )
        assert sentence in str(report)


def test_what_lesson_21_says_of_the_records():
    records = {
        record["shape"][1]: {row["label"]: row["microseconds"] for row in record["rows"]}
        for record in bench.load_records("NVIDIA H200")["records"]
        if record["name"] == "all_reduce" and record["shape"][0] == 2
    }
    few, many = ({n for n in records if (n < 4_194_304) is side} for side in (True, False))
    assert few and many and {256, 65_536, 67_108_864} <= {*records}
    for n in few:
        assert records[n]["NCCL"] < min(records[n]["gather"], records[n]["ring"])
    for label in RUNGS:
        assert records[65_536][label] < 1.1 * records[256][label]
    assert records[65_536]["NCCL"] < 1.2 * records[256]["NCCL"]
    for n in many:
        assert records[n]["ring"] < 1.05 * records[n]["NCCL"]  # level, or faster
    assert records[max(many)]["ring"] < records[max(many)]["NCCL"]
