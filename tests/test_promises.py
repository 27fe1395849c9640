"""What the course promises of speed, memory and errors, and that the records keep it."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from course_lib import bench, results_table
from course_lib.benchmarks import efficientnet, kernel_cache, profile_squeeze_excite
from course_lib.benchmarks import softmax as softmax_benchmark
from course_lib.benchmarks import squeeze_excite as block_benchmark
from course_lib.benchmarks.network_profile import BLOCK
from course_lib.kernels import activation, softmax

H200 = bench.load_records("NVIDIA H200")
L2_BYTES = H200["device"]["l2_bytes"]
EAGER = "PyTorch eager"
SOFTMAX = {f"{name}.{way}" for name in softmax.OPERATIONS for way in ("forward", "backward")}
VECTORISED = (*activation.OPERATIONS, "global_avg_pool")
BEST = ", bfloat16, channels-last, captured, in parallel"  # of two pathways
FASTEST = f"PyTorch{BEST}"


@dataclass(frozen=True)
class Promise:
    """`measure` of each record that `covers` is `least` at least, but for what is in `lost`."""

    what: str
    covers: Callable
    measure: Callable
    least: float
    lost: tuple = ()


def operation(record):
    return record["name"].partition(".")[0]


def row(record, label=None):
    (found,) = [r for r in record["rows"] if r["label"] == (label or record["default"])]
    return found


def faster_than(peer, ours=None, clock="microseconds"):
    """How many times as fast as `peer` the rung `ours` is: the default one."""
    return lambda record: row(record, peer)[clock] / row(record, ours)[clock]


def share(ours=None):
    """How many per cent of a copy's rate the rung reaches."""
    return lambda record: row(record, ours)["percent_of_copy"]


def named(*names, **facts):
    return lambda record: record["name"] in names and facts.items() <= record.items()


def memory(ours, field):
    return lambda record: record[field][EAGER] / record[field][ours]


def fused(operation_name, least):
    return Promise(
        f"{operation_name}: {least} times as fast as PyTorch's chain",
        lambda r: operation(r) == operation_name and not r["name"].endswith(".drawn")
        and r["bytes"] >= 4 * L2_BYTES, faster_than(EAGER), least)


#: Channels-last: 8.8 µs against 3.2 the first, 7.3 against 4.6 the last, the others up to 15 %.
POOLED_SLOWLY = tuple(
    (f"global_avg_pool.{name}", dtype, *shape) for name, dtype, shape in (
        ("backward.channels-last", "bfloat16", (1, 24, 190, 190)),
        ("backward.channels-last", "float32", (1, 24, 190, 190)),
        ("backward.channels-last", "float32", (1, 192, 48, 48)),
        ("forward.channels-last", "bfloat16", (32, 2688, 12, 12)),
        ("forward.channels-last", "float32", (32, 1792, 12, 12)),
        ("forward.channels-last", "float32", (32, 2688, 12, 12)),
        ("forward.channels-last.drawn", "bfloat16", (12, 175, 6, 9)),
    )
)  # fmt: skip
JOINT_LOSS = named("cross_entropy.both", shape=[8192, 32000])
PROMISES = [
    Promise("activations and pooling: at most 3 % slower than PyTorch",
            lambda r: operation(r) in VECTORISED, faster_than(EAGER, "vectorised"), 1 / 1.03,
            # 1.81 µs against 1.74, of 20,000 elements; few channels in one image, and few pixels.
            lost=(("gelu.backward.drawn", "bfloat16", 7, 1476), *POOLED_SLOWLY)),
    *(Promise(f"{what}: {least} % of a copy past four times the L2 cache",
              lambda r, what=what: operation(r) in VECTORISED and r["bytes"] >= 4 * L2_BYTES
              and r["name"].startswith("global_avg_pool.backward") == (what == "pooling backward"),
              share("vectorised"), least)
      for what, least in (("activations", 92), ("pooling backward", 90))),
    *(Promise(f"softmax: at most 3 % slower than {peer}",
              lambda r, ways=ways: r["name"] in SOFTMAX and r["name"].endswith(ways),
              faster_than(peer), 1 / 1.03)
      for peer, ways in ((EAGER, ("forward", "backward")), ("torch.compile", "forward"),
                         ("Triton", "forward"))),
    Promise("softmax: 92 % of a copy past twice the L2 cache", lambda r: r["name"] in SOFTMAX
            and r["bytes"] > 2 * L2_BYTES and r["shape"][-1] <= 50_304, share(), 92,
            lost=(("softmax.forward", "bfloat16", 4096, 50304),)),  # 88 %
    Promise("nn.Softmax: a call costs 1.5 times PyTorch's", named("softmax.host"),
            faster_than("torch.nn.Softmax", "nn.Softmax"), 1 / 1.5,
            lost=(("softmax.host", "float32", 128, 200),)),
    Promise("nn.Softmax: a recorded call costs 2.5 times PyTorch's", named("softmax.host"),
            faster_than("torch.nn.Softmax, recorded", "nn.Softmax, recorded"), 1 / 2.5),
    Promise("cross-entropy, both ways: 2.5 times as fast as PyTorch's chain", JOINT_LOSS,
            faster_than(EAGER), 2.5),
    Promise("cross-entropy, both ways: 90 % of a copy", JOINT_LOSS, share(), 90),
    Promise("cross-entropy, both ways: 40 % of PyTorch's memory", JOINT_LOSS,
            memory("ours", "peak_extra_bytes"), 2.5),
    fused("softmax_dropout", 1.7), fused("bn_relu_softmax", 2.5),
    *(Promise(f"{what}: a second process starts 5 times as fast", named(kernel_cache.NAME),
              lambda r, what=what: row(r, f"{what}, warm")["speedup"], 5)
      for what in kernel_cache.OPERATIONS),
    # 16 bits: we save float32 sums all the same, PyTorch 16-bit numbers.
    Promise("squeeze-and-excitation saves no more than PyTorch",
            lambda r: r["name"] in ("squeeze_excite.forward", "squeeze_excite.both")
            and r["dtype"] == "float32" and "saved_bytes" in r, memory("ours", "saved_bytes"), 1),
    *(Promise(f"squeeze-and-excitation, {rung}: 2.4 sizes of x move",
              named(profile_squeeze_excite.NAME),
              lambda r, rung=rung: 1 / row(r, rung)["sizes_of_x"], 1 / 2.4)
      for rung in ("fused", "auto")),
    *(Promise(f"a step's profile {what}", named(efficientnet.STEP), measure, least)
      for what, measure, least in (
          ("is no shorter than without its blocks",
           lambda r: r["blocks_by_removal"]["before"] / r["profile"]["before"][BLOCK], 0.7),
          ("is no longer than without its blocks",
           lambda r: r["profile"]["before"][BLOCK] / r["blocks_by_removal"]["before"], 1 / 1.4),
          *((f"has its graph's kernels, {when}", lambda r, when=when: 1 - abs(
              r["kernel_microseconds"][when] / r["graph_microseconds"][when] - 1), 0.85)
            for when in ("before", "after")))),
    Promise("prefetch: faster than a copy when needed", named("prefetch.training"),
            faster_than("copied when needed", "by backend.prefetch"), 1),
    Promise("two pathways, training: ours ahead, by far where float32 is captured",
            named("two_pathways.training"), lambda r: min(
                faster_than("PyTorch, naive", "ours")(r), faster_than(FASTEST, f"ours{BEST}")(r),
                faster_than("PyTorch, captured", "ours, captured")(r) / 1.3), 1),
    Promise("two pathways: checkpointing costs more than a third", named("two_pathways.training"),
            faster_than("PyTorch, checkpointing", "PyTorch, naive"), 4 / 3),
    Promise("two pathways, forward in bfloat16: PyTorch ahead", named("two_pathways.forward"),
            faster_than(f"ours{BEST}", FASTEST), 1.15),
    *(Promise(f"two pathways: {faster} before {slower}, {name}", named(name),
              faster_than(slower, faster), 1)
      for name, faster, slower in (
          ("two_pathways.forward", "ours, two GPUs", "ours"),
          ("two_pathways.forward", "PyTorch, two GPUs", "PyTorch, naive"),
          ("two_pathways.forward", "PyTorch, TF32", "PyTorch, TF32, two GPUs"),
          ("two_pathways.training", "ours", "ours, two GPUs"))),
    Promise("two GPUs: nearly twice the images where the host does not limit a step",
            lambda r: operation(r) == "data_parallel", lambda r: min(
                r[f"scaling_ours{way}"] for way in ("_captured", "")
                if way or r["dtype"] == "float32"), 1.8),
]  # fmt: skip


def case(record):
    return record["name"], record["dtype"], *record["shape"]


def broken(promise, records=H200["records"]):
    """The cases, of those that the promise covers, in which it is not kept."""
    covered = [record for record in records if promise.covers(record)]
    assert covered, f"nothing is recorded of what is promised: {promise.what}"
    return [case(r) for r in covered if not promise.measure(r) >= promise.least]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.what)
def test_the_records_keep_what_the_course_promises(promise):
    assert broken(promise) == list(promise.lost)
    # And each of them is looked at: no number is enough for a promise without end.
    covered = [case(record) for record in H200["records"] if promise.covers(record)]
    assert broken(replace(promise, least=math.nan)) == covered


#: (direction, peer, clock) -> the least geometric mean of the block's speed-ups, and the least of
#: all. What was reached so far, a little below what was measured; the aim is 2.75 and 1.5 against
#: PyTorch eager, 1.5 against torch.compile. What Python sees varies with the host.
BLOCKS = {
    ("forward", EAGER, ""): (2.0, 1.5), ("forward", EAGER, "python_"): (2.5, 1.5),
    ("both", EAGER, ""): (2.4, 1.8), ("both", EAGER, "python_"): (1.5, 1.1),
    ("forward", "torch.compile", ""): (1.2, 1.0),
    ("forward", "torch.compile", "python_"): (3.2, 1.3),
    ("both", "torch.compile", ""): (1.4, 1.0), ("both", "torch.compile", "python_"): (2.2, 1.6),
}  # fmt: skip


@pytest.mark.parametrize("direction, peer, clock", BLOCKS)
def test_squeeze_and_excitation_is_as_fast_as_promised(direction, peer, clock):
    found = bench.find(H200, name=f"squeeze_excite.{direction}")
    ratios = results_table.block_speedups(found, peer, clock)
    least_mean, least = BLOCKS[direction, peer, clock]
    assert statistics.geometric_mean(ratios) >= least_mean and min(ratios) >= least


def test_the_network_gains_what_is_promised():
    steps = bench.find(H200, name=efficientnet.STEP)
    assert any(step["ratio"] >= 1.15 or (step["amdahl"]["saved_of_possible"] or 0) >= 0.9
               for step in steps)


def test_nothing_that_is_promised_is_missing():
    promised = {(f"softmax.{way}", dtype, *shape) for shape in softmax_benchmark.SHAPES
                for dtype in softmax_benchmark.DTYPES for way in ("forward", "backward")}
    promised |= {
        (f"squeeze_excite.{way}", dtype, N, C, side, side) for way in block_benchmark.DIRECTIONS
        for N in block_benchmark.BATCHES for C, side, _ in block_benchmark.SIZES
        for dtype in block_benchmark.DTYPES}
    assert promised <= {case(record) for record in H200["records"]}
