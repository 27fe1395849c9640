"""What every exercise's cases must offer, so that no constant of the learner's happens to suffice.

Scalars are drawn and vary, no launch comes twice, and one case is larger than all others.
"""

import numpy as np
import pytest

from course_lib.teach.exercise import exercises

KERNELS = [name for name, exercise in exercises().items() if exercise.kind != "answer"]
SEEDS = (1, 2, 3, 4)
#: Exercises of which the block is a part: as many threads as a tile, a warp, or a warp per group.
BLOCK_IS_FIXED = ("squeeze_excite_fused", "conv2d_tiled", "implicit_gemm", "matmul_registers",
                  "mma_tile", "attention_scores", "attention_output", "flash_attention",
                  "flash_attention_causal", "flash_attention_dkdv",
                  "flash_attention_dq")  # fmt: skip
#: Exercises that are given words, and a few numbers beside them.
WORDS = ("choose_backend", "pick_device")
#: Exercises whose arrays have one element each: one thread decides, however many there are.
ONE_OF_EACH = ("next_scale",)
#: Whole numbers of which a kernel reads one from memory: they vary from launch to launch.
READ_FROM_MEMORY = ("found", "good", "steps")


def cases(name, seed=1):
    return exercises()[name].cases(np.random.default_rng(seed))


def scalars(case):
    """The plain numbers and words among a case's inputs, by name."""
    return {
        key: value.item()
        for key, value in case.inputs.items()
        if np.ndim(value) == 0 and key not in ("dy", "like")  # arrays without dimensions
    }


def elements(case):
    return sum(np.size(value) for value in case.inputs.values())


def size(case):
    """How large a case is: its elements, or its numbers, where it has no arrays."""
    if any(np.ndim(value) for value in case.inputs.values()):
        return elements(case)
    return float(np.prod([1 + abs(each) for each in scalars(case).values()]))


def shapes(case):
    return tuple(np.shape(value) for value in case.inputs.values())


@pytest.mark.parametrize("name", KERNELS)
def test_scalars_vary_and_are_drawn(name):
    found = [cases(name, seed) for seed in SEEDS]
    for key, first in scalars(found[0][0]).items():
        if isinstance(first, str):
            continue  # words, of which there are as many as the exercise knows
        drawn = [[scalars(case)[key] for case in each] for each in found]
        if isinstance(first, bool):
            assert set(drawn[0]) == {True, False}, key
            continue
        if name == "prepare" and key == "blocks":
            continue  # which the kernel does not get
        assert len(set(drawn[0])) > 2 and not set(drawn[0]) <= {0, 1}, f"{key} never varies"
        assert any(each != drawn[0] for each in drawn[1:]), f"{key} does not come from rng"


@pytest.mark.parametrize("name", [n for n in KERNELS if exercises()[n].kind == "kernel"])
def test_no_launch_comes_twice(name):
    for seed in SEEDS:
        seen = [(each.grid, each.block, shapes(each), scalars(each)) for each in cases(name, seed)]
        assert all(one not in seen[:i] for i, one in enumerate(seen))


@pytest.mark.parametrize("name", KERNELS)
def test_one_case_exceeds_all_others(name):
    exercise = exercises()[name]
    if name in WORDS:
        return
    for seed in SEEDS:
        *others, largest = sorted(cases(name, seed), key=lambda case: (size(case), case.threads))
        if name not in ONE_OF_EACH:
            assert size(largest) >= 1.25 * size(others[-1])
        if exercise.kind == "kernel":
            assert largest.threads <= 2048
            if name not in BLOCK_IS_FIXED:
                assert int(np.prod(largest.block)) >= 256


@pytest.mark.parametrize("name", KERNELS)
def test_the_largest_case_has_a_size_that_is_drawn(name):
    """A shared array that is as long as the largest row of one check is too short for another."""
    if not any(np.ndim(value) for value in cases(name)[0].inputs.values()):
        return
    if name in ONE_OF_EACH:
        return
    assert len({shapes(max(cases(name, seed), key=elements)) for seed in SEEDS}) > 1


@pytest.mark.parametrize("name", KERNELS)
def test_indices_and_labels_have_several_values(name):
    for key, value in max(cases(name), key=elements).inputs.items():
        if np.ndim(value) and value.dtype.kind in "iu":
            if key in READ_FROM_MEMORY:
                value = [case.inputs[key].item() for case in cases(name)]
            assert len(np.unique(value)) > 1, key
