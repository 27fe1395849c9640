"""No figure of the project is above its ceiling: `python tests/house.py` prints them all."""

import sys
from pathlib import Path

import house
import pytest
from figures import documents, kernels, reports, sources, walks

from course_lib.kernels import activation, softmax

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
#: What the sources say today; the reports are of the last `make test`, which may be of others.
HELD = [figure for figure in house.FIGURES if figure.name not in reports.figures()]


@pytest.fixture(scope="module")
def measured():
    return house.measure()


@pytest.mark.parametrize("figure", HELD, ids=lambda figure: figure.name)
def test_no_figure_is_above_its_ceiling(figure, measured):
    value, counted = measured[0][figure.name]
    if value == walks.ELSEWHERE:
        pytest.skip(f"counted on Python {walks.COUNTED_IN} alone")
    assert figure.is_kept(value), "\n".join(map(str, counted))


@pytest.mark.skipif(sys.version_info[:2] != walks.COUNTED_IN, reason="walks are of Python 3.11")
def test_contributing_is_in_step(measured):
    text = documents.PAGE.read_text(encoding="utf-8")
    assert documents.filled(text, measured[1]) == text, "run: python tests/house.py --docs"


def test_ceilings_only_fall():
    text = Path(house.__file__).read_text(encoding="utf-8")
    for change, changed in ((-1, -1), (0, 0), (1, 0)):
        found = {f.name: (f.ceiling - change if f.least else f.ceiling + change, ["x"])
                 for f in house.FIGURES}  # fmt: skip
        namespace = {"__file__": house.__file__, "__name__": "lowered"}
        exec(compile(house.lowered(text, found), "lowered", "exec"), namespace)
        for before, after in zip(house.FIGURES, namespace["FIGURES"], strict=True):
            assert abs(after.ceiling - before.ceiling) == abs(changed), before.name
            assert before.is_kept(found[before.name][0]) == (change <= 0)
        said = "\n".join(house.table(found, where=True))
        assert said.count("lower the ceiling") == (len(house.FIGURES) - 3) * (change < 0)
        assert said.count("ABOVE") == (len(house.FIGURES) - 3) * (change > 0)


def test_a_circle_is_found():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sources.circles(edges) == [{"a", "b", "c"}, {"d", "e"}]
    assert sources.circles(edges | {"c": set(), "e": set()}) == []


def test_imports_in_functions_and_of_names_count(tmp_path, monkeypatch):
    files = {
        "__init__.py": "from course_lib.a import b\n",
        "a/__init__.py": "from .b import f as g\nimport os\n",
        "a/b.py": "def f():\n    from .. import cuda\n    from . import c\n",
        "a/c.py": "if TYPE_CHECKING:\n    from course_lib.a import b\n",
    }
    for name, text in files.items():
        path = tmp_path / "course_lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "course_lib")
    monkeypatch.setattr(sources, "modules", sources.modules.__wrapped__)
    assert sources.graph() == {
        "course_lib": {"course_lib.a.b"},
        "course_lib.a": {"course_lib.a.b"},
        "course_lib.a.b": {"course_lib", "course_lib.a.c"},
        "course_lib.a.c": set(),
    }
    assert sources.circles(sources.graph()) == [{"course_lib", "course_lib.a.b"}]


def test_what_a_lesson_loops_over_is_found():
    text = (
        "from course_lib.kernels import activation\n"
        "from course_lib.kernels import softmax as ours\n"
        "for variant in ours.BACKWARD:\n    pass\n"
        "for variant in activation.relu.FORWARD:\n    pass\n"
    )
    assert list(kernels.looped(text)) == [softmax.BACKWARD, activation.relu.FORWARD]


def test_what_nothing_launches_is_left_out(monkeypatch):
    every = {kernel for _, way in kernels.ways() for kernel in way.kernels}
    one = kernels.ladders()["relu.forward"]["naive"].kernels[0]
    named = {(label, rung) for label, ladder in kernels.ladders().items() for rung in ladder}
    assert "attention.backward tensor_core/atomic" in kernels.ways_of_lessons()
    monkeypatch.setattr(kernels, "ways_of_lessons", set)
    for launched, lessons, expected in (
        (set(), set(), every),
        (every - {one}, set(), {one}),
        (every - {one}, named, set()),
        (set(), named, set()),
    ):
        monkeypatch.setattr(kernels, "launched_by_auto", lambda launched=launched: launched)
        monkeypatch.setattr(kernels, "rungs_of_lessons", lambda lessons=lessons: lessons)
        assert set(kernels.left_out()) == expected


def test_reports_are_read(tmp_path):
    assert set(reports.figures(tmp_path).values()) == {("no report", ())}
    case = '<testcase classname="tests.{}" name="{}" time="{}">{}</testcase>'
    proved = '<properties><property name="proved" value="bits"/></properties>'
    cases = [
        case.format("test_contract", "test_a_rung[x]", 30, proved * 2),
        case.format("test_check_bank", "test_wrong_is_rejected[a]", 20, ""),
        case.format("test_check_bank", "test_wrong_is_rejected[b]", 20, "<failure/>"),
    ]
    for name in reports.RUNS:
        text = "".join(cases if name == "tests" else ())
        (tmp_path / f"{name}.xml").write_text(
            f'<testsuites><testsuite time="60">{text}</testsuite></testsuites>'
        )
    found = {name: value for name, (value, _) in reports.figures(tmp_path).items()}
    assert found == {
        "contract proofs": 2,
        "planted mistakes rejected": 0,
        "known-wrong kernels rejected": 1,
        "minutes of make test": 3,
    }
