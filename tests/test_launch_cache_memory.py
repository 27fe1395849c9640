"""The launch cache: where results and workspace of a repeated run lie, and for how long."""

import itertools
import weakref

import pytest
import torch
from cached_launches import difference_kernel, made, run, scale_kernel, stand_in, tensor
from hypothesis import given
from hypothesis import strategies as st

from course_lib.runtime.host import arrays, launch_cache


@pytest.fixture(autouse=True)
def state(monkeypatch):
    return stand_in(monkeypatch)


def chain(x, y, factor):
    """As `two_results`, by a chain of arrays, each of which two launches need."""
    last = y
    for _ in range(5):
        last, before = arrays.empty_like(x), last
        run(scale_kernel, before, last, 1.0)
    result, scaled = arrays.empty_like(x), arrays.empty_like(x)
    run(scale_kernel, last, scaled, factor)
    run(difference_kernel, x, scaled, result)
    arrays.empty_like(x)  # which no launch needs
    return result, scaled


def test_the_workspace_holds_what_is_needed_at_one_time(monkeypatch):
    sizes, empty = [], torch.empty_strided

    def noted(shape, strides, *, dtype, device):
        sizes.append(shape[0] if dtype is torch.uint8 else 0)
        return empty(shape, strides, dtype=dtype, device=device)

    launcher = made(chain)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", noted)
        for _ in range(3):
            x, y = tensor(8, 32), tensor(8, 32)
            result, scaled = launcher(x, y, 3.0)
            assert torch.equal(scaled, y * 3) and torch.equal(result, x - y * 3)
    assert launcher.thought == 1
    assert max(sizes) == 2 * 8 * 32 * 4


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=12))
def test_pieces_of_the_workspace(found):
    sizes = {name: size * launch_cache.APART for name, (size, _, _) in enumerate(found)}
    times = {name: (first, first + more) for name, (_, first, more) in enumerate(found)}
    offsets = launch_cache._offsets(sizes, times)
    for a, b in itertools.combinations(sizes, 2):
        together = times[a][0] <= times[b][1] and times[b][0] <= times[a][1]
        apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
        assert apart or not together
    assert all(offset >= 0 and offset % launch_cache.APART == 0 for offset in offsets.values())
    # No place is higher than all the others together would make it.
    assert all(offset <= sum(sizes.values()) - sizes[n] for n, offset in offsets.items())


@pytest.mark.parametrize("worth", [1, 64 << 10])
def test_a_result_may_lie_where_workspace_lay(monkeypatch, worth):
    live, seen, empty = [], [], torch.empty_strided

    def noted(shape, strides, *, dtype, device):
        made = empty(shape, strides, dtype=dtype, device=device)
        live.append(made.nbytes)
        weakref.finalize(made, live.remove, made.nbytes)
        seen.append(sum(live))
        return made

    def body(x, y):
        """The first result needs three arrays on the way, the second one."""
        ways = [arrays.empty_like(x) for _ in range(3)]
        for way in ways:
            run(scale_kernel, x, way, 2.0)
        first, second, way = (arrays.empty_like(x) for _ in range(3))
        run(difference_kernel, ways[0], ways[1], first)
        run(difference_kernel, first, ways[2], first)
        run(scale_kernel, y, way, 3.0)
        run(difference_kernel, way, x, second)
        return first, second

    monkeypatch.setattr(launch_cache, "WORTH", worth)
    launcher, n = made(body), 8 * 32 * 4
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", noted)
        for _ in range(3):
            x, y = tensor(8, 32), tensor(8, 32)
            live.clear()
            first, second = launcher(x, y)
            assert torch.equal(first, -2 * x) and torch.equal(second, 3 * y - x)
            del first, second
    assert launcher.thought == 1
    assert max(seen) == (4 * n if worth == 1 else 5 * n)


@given(
    pieces=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=9),
    results=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 14)), min_size=1, max_size=4),
    worth=st.integers(1, 4000),
)
def test_parts_of_a_run(pieces, results, worth):
    n_launches = 15
    sizes = {name: size * launch_cache.APART for name, (size, _, _) in enumerate(pieces)}
    times = {name: (first, first + more) for name, (_, first, more) in enumerate(pieces)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_cache, "WORTH", worth)
        parts = launch_cache._parts(n_launches, sizes, times, results)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == n_launches
    assert sorted(i for part in parts for i in part.results) == list(range(len(results)))
    assert sorted(name for part in parts for name in part.offsets) == sorted(sizes)
    for part in parts:
        assert all(part.first <= results[i][1] < part.end for i in part.results)
        for name, offset in part.offsets.items():
            assert part.first <= times[name][0] and times[name][1] < part.end
            assert offset + sizes[name] <= part.n_bytes
    for before, part in itertools.pairwise(parts):
        assert launch_cache._saved(before.n_bytes, part, results) >= worth
