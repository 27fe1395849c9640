"""A record is stale where today's plan would launch otherwise: each operation, by one constant."""

import copy
import functools
import importlib
import sys

import pytest

from course_lib import bench
from course_lib.benchmarks import launches
from course_lib.kernels import activation
from course_lib.kernels.activation import OPERATIONS
from course_lib.runtime.compile import compiler

HELD = bench.load_records("NVIDIA H200")
LISTED = [record for record in HELD["records"] if "launches" in record]
CACHE = type(functools.cache(lambda: None))
#: (module of kernels, deciding constant, another value, the names of the records that this makes
#: stale: one size of each at least).
DECIDING = [
    ("activation", "BLOCK_SIZE", 128, {
        f"{name}.{way}" for name in OPERATIONS for way in ("forward", "backward")
    }),
    ("global_avg_pool", "FEW_PLANES", 100, {"global_avg_pool.forward"}),
    ("softmax.plan", "SPLIT_THREADS", {1: 1024, 2: 1024}, {
        "softmax.forward", "log_softmax.forward",
    }),
    ("cross_entropy.rows", "PER_THREAD", 8, {
        "cross_entropy.forward", "cross_entropy.backward", "cross_entropy.both",
    }),
    ("dice", "PIXELS_OF_A_THREAD", 2, {
        "segmentation_loss.dice.forward", "segmentation_loss.dice.both",
    }),
    ("blocks.row_plan", "FEW_THREADS", 64, {
        "softmax.forward", "softmax.backward",
        "softmax_dropout.forward", "softmax_dropout.backward", "softmax_dropout.both",
    }),
    ("bn_relu_softmax", "FEW_THREADS", {"forward": 64, "backward": 64}, {
        "bn_relu_softmax.backward", "bn_relu_softmax.both",
    }),
    ("squeeze_excite.batched", "LARGE_LAYERS", 5_000_000, {
        "squeeze_excite.forward", "squeeze_excite.both",
    }),
    ("gemm.warpgroup_plan", "LEAST_TILES", 200, {
        "linear.forward", "linear.backward", "linear.backward.tf32",
    }),
    ("conv2d.warpgroup_mixed_plan", "SPEED", 0.5, {"conv2d.forward", "conv2d.dx"}),
    ("conv_transpose2d.upsample2x", "LARGE_FROM", 1 << 20, {
        f"conv_transpose2d.forward{end}" for end in ("", ".tf32")
    }),
    ("max_pool2d.plan", "PATCH_THREADS", (128, 128), {
        f"max_pool2d.{way}{end}" for way in ("forward", "backward") for end in ("", ".3x3")
    }),
    ("batch_norm.plan", "PASS_ROWS", 4, {
        f"batch_norm.{way}.channels-last" for way in ("forward", "backward", "inference")
    }),
    ("optimizers.table", "MOST_TILES", 4, {"sgd.step", "adamw.step"}),
]  # fmt: skip


def forget_plans():
    """Planners remember what they have found.

    What makes kernels remembers too, without a limit. It goes on remembering: a kernel made again
    would not be the one that its rung names.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("course_lib.kernels"):
            for found in [value for value in vars(module).values() if isinstance(value, CACHE)]:
                if found.cache_parameters()["maxsize"] is not None:
                    found.cache_clear()


@pytest.fixture
def changed(monkeypatch):
    """change(module, constant, value), until what it returns is called or the test ends."""

    def undo():
        monkeypatch.undo()
        forget_plans()

    def change(module, constant, value):
        module = importlib.import_module(f"course_lib.kernels.{module}")
        assert getattr(module, constant) != value
        monkeypatch.setattr(module, constant, value)
        forget_plans()
        return undo

    yield change
    undo()


@pytest.mark.parametrize("row", DECIDING, ids=lambda row: ".".join(row[:2]))
def test_a_deciding_constant_makes_stale_what_it_decides(row, changed):
    *constant, expected = row
    others = {record["name"]: record for record in LISTED}  # one of each, the largest
    asked = [r for r in LISTED if fixed(r) in expected or r is others[r["name"]]]
    undo = changed(*constant)
    found = stale_names(asked)
    undo()
    wrong = found ^ expected
    already = stale_names(r for r in LISTED if fixed(r) in wrong)
    assert wrong <= already, "what waits to be measured again is stale whatever changes"


def stale_names(records):
    """The names of those that are stale: of each, records are looked at up to the first one."""
    found = set()
    for record in records:
        if fixed(record) not in found and launches.stale(record, HELD["device"])[0]:
            found.add(fixed(record))
    return found


def fixed(record):
    """Its name, that of what was measured at fixed shapes."""
    return record["name"].removesuffix(".drawn")


def record(name="relu.forward"):
    return copy.deepcopy(next(r for r in LISTED if r["name"] == name))


def why(found):
    stale, reason = launches.stale(found, HELD["device"])
    assert stale == (reason is not None)
    return reason


@pytest.mark.parametrize("field, value", [
    ("grid", [7]), ("block", [7]),
    ("cluster", 2), ("shared_bytes", 16), ("overlap", None), ("scalars", [1.5]),
])  # fmt: skip
def test_a_launch_that_differs_makes_a_record_stale(field, value):
    found = record()
    assert why(found) is None
    found["launches"]["vectorised"][0][field] = value
    assert why(found).startswith("vectorised: ")
    assert f"another {field}" in why(found)


def test_another_kernel_makes_a_record_stale_and_another_place_of_it_does_not():
    found = record()
    (launch,) = found["launches"]["vectorised"]
    launch["kernel"] = "course_lib.kernels.elsewhere:make.<locals>.vectorised_kernel"
    assert why(found) is None
    launch["kernel"] = "course_lib.kernels.activation:other"
    assert why(found).endswith("is launched, not course_lib.kernels.activation:other")


def test_the_number_of_launches_and_the_rungs_count():
    found = record()
    found["launches"]["naive"] *= 2
    assert why(found) == "naive makes 1 launches, not 2"
    found["rows"][0]["label"] = "no such rung"
    found["launches"] = {"no such rung" if k == "naive" else k: v
                         for k, v in found["launches"].items()}  # fmt: skip
    assert why(found).startswith("no such rung is refused: ")
    del found["launches"]["no such rung"]
    assert why(found) == "other rungs are timed"


def test_ptx_decides_where_it_is_known_and_else_the_source(monkeypatch):
    found = record()
    (launch,) = found["launches"]["vectorised"]
    assert launch["ptx"] is not None, "the compile gate knows what is recorded"
    launch["source"] = "another, of a comment"
    assert why(found) is None
    launch["ptx"] = "another"
    assert why(found).endswith("has other PTX")
    monkeypatch.setattr(launches, "_ptx_hashes", lambda capability: {})
    assert why(found).endswith("has another source, and its PTX is not known")


def test_a_program_goes_by_ptx_where_it_is_known_and_else_by_its_source(monkeypatch):
    listed = [*activation.specialisations()][:2]
    monkeypatch.setattr(compiler, "case_key", lambda source, by: source[0])

    def hashed(text, **known):
        monkeypatch.setattr(launches, "fingerprint_of", lambda kernel: text)
        monkeypatch.setattr(launches, "_ptx_hashes", lambda capability: known)
        return launches.specialisations_hash(listed)

    by_ptx, by_source = hashed("before", before="PTX"), hashed("before")
    assert by_ptx == hashed("after", after="PTX") != hashed("after", after="other PTX")
    assert by_ptx != by_source == hashed("before", after="PTX") != hashed("after")


def test_a_program_is_the_same_in_any_order_and_with_any_numba(monkeypatch):
    listed = [*activation.specialisations()]
    found = launches.specialisations_hash(listed)
    monkeypatch.setattr(compiler, "compiled_by", lambda: ["another numba"])
    assert launches.specialisations_hash(listed[::-1]) == found
    fewer = [each for each in listed if "relu6" not in each[0]]
    kept = launches.specialisations_hash(listed, lambda label: "relu6" not in label)
    assert kept == launches.specialisations_hash(fewer) != found
    monkeypatch.setattr(launches, "_compiled_by", compiler.compiled_by)
    assert launches.specialisations_hash(listed) != found, "the compile gate knows their PTX"


def test_a_kernel_without_specialisations_is_told():
    with pytest.raises(ValueError, match="kernels.activation lists no specialisation of "):
        launches.of_kernels(activation.leaky_relu_of(0.3).FORWARD["naive"].kernels, activation)


def test_other_chips_get_other_launches():
    found = record("squeeze_excite.forward")
    smaller = HELD["device"] | {"compute_capability": [8, 0], "shared_bytes": 163 << 10}
    assert launches.stale(found, smaller)[0]


#: Where the rung that runs by default takes over a tenth longer than the best one recorded: few and
#: short rows that begin on no boundary of 16 bytes.
BEHIND = {
    ("bn_relu_softmax.forward.drawn", (263, 30), "bfloat16"),
    ("bn_relu_softmax.forward.drawn", (263, 30), "float32"),
    ("softmax_dropout.forward.drawn", (263, 30), "bfloat16"),
    ("softmax_dropout.backward.drawn", (263, 30), "bfloat16"),
    ("softmax_dropout.both.drawn", (263, 30), "bfloat16"),
}


#: A way that is faster, but not deterministic: it runs for those who ask for it.
BY_NAME = "tensor_core/atomic"


def test_what_runs_by_default_is_never_far_behind_the_best_rung():
    compared, behind = set(), set()
    for record in LISTED:
        times = {row["label"]: row["microseconds"] for row in record["rows"]
                 if row["kind"] == "ours" and "captured" not in row["label"]
                 and row["label"] != BY_NAME}  # fmt: skip
        if record.get("default") in times and len(times) > 1:
            compared.add(record["name"].partition(".")[0])
            if times[record["default"]] > 1.1 * min(times.values()):
                behind.add((record["name"], tuple(record["shape"]), record["dtype"]))
    assert behind == BEHIND
    assert compared >= {"softmax", "cross_entropy", "squeeze_excite", "conv2d", "linear"}, compared
