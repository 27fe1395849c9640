"""The doctor finds each thing that can be wrong, and names the one command that mends it."""

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from course_lib import doctor
from course_lib.doctor.problems import within
from course_lib.runtime.compile import cache

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = {
    "torch": "2.15.0",
    "torchvision": "0.29.2",
    "numba": "0.68.1",
    "numba-cuda": "0.30.4",
    "numpy": "2.4.6",
    "greenlet": "3.5.6",
    "ml_dtypes": "0.6.0",
    "array-api-compat": "1.16.0",
    "matplotlib": "3.11.2",
    "jupyterlab": "4.6.6",
    "ipykernel": "7.4.0",
    "pyyaml": "6.0.3",
    "tqdm": "4.70.1",
}
NO_GPU = doctor.Facts(
    python=(3, 11, 7),
    executable=".venv/bin/python",
    platform="linux",
    packages=PACKAGES,
    torch_cuda="13.2",
    torchvision_wants=">=2.14.0",
    toolkit={"nvvm": "13.2.86", "nvJitLink": "13.5.37", "nvrtc": "13.2.86"},
)
GPU = dataclasses.replace(
    NO_GPU,
    driver_release="580.65.06",
    driver_cuda=(13, 0),
    gpus=(doctor.Gpu("NVIDIA H200", (9, 0), 150_000_000_000),),
)
MAC = dataclasses.replace(
    NO_GPU,
    platform="darwin",
    packages={**PACKAGES, "numba-cuda": None},
    torch_cuda=None,
    toolkit={"nvvm": None, "nvJitLink": None, "nvrtc": None},
    mps=True,
)
PIP = ".venv/bin/python -m pip install"


def packages(**changes):
    return {**PACKAGES, **{name.replace("_cuda", "-cuda"): v for name, v in changes.items()}}


@pytest.mark.parametrize("facts", [NO_GPU, GPU, MAC], ids=["no GPU", "GPU", "macOS"])
def test_nothing_is_wrong_with_a_healthy_machine(facts):
    assert doctor.diagnose(facts) == []
    assert doctor.report(facts, []).endswith("\n\nAll is well.")


WRONG = {
    "python too old": (
        NO_GPU,
        {"python": (3, 10, 13)},
        "Python 3.10.13 is too old",
        "make setup PYTHON=python3.12",
    ),
    "numpy too new": (
        NO_GPU,
        {"packages": packages(numpy="2.5.0")},
        "numpy 2.5.0 is too new: numba-cuda fails",
        f"{PIP} 'numpy>=2,<2.5'",
    ),
    "numpy missing, and so numba cannot be imported": (
        NO_GPU,
        {
            "packages": packages(numpy=None),
            "import_errors": {"numba": "ModuleNotFoundError: No module named 'numpy'"},
        },
        "numpy is not installed",
        f"{PIP} 'numpy>=2,<2.5'",
    ),
    "numba too new": (
        NO_GPU,
        {"packages": packages(numba="0.69.0")},
        "numba 0.69.0 is here, but the course needs >=0.68,<0.69",
        f"{PIP} 'numba>=0.68,<0.69'",
    ),
    "numba-cuda too old, as its cu12 extra installs it": (
        NO_GPU,
        {"packages": packages(numba_cuda="0.13.0")},
        "numba-cuda 0.13.0 is here",
        f"{PIP} 'numba-cuda[cu13]>=0.30,<0.31'",
    ),
    "greenlet missing, and no pip": (
        NO_GPU,
        {"packages": packages(greenlet=None), "has_pip": False},
        "greenlet is not installed",
        "uv pip install --python .venv/bin/python 'greenlet>=3.1'",
    ),
    "torchvision for another torch": (
        NO_GPU,
        {"packages": packages(torch="2.13.0")},
        "torchvision 0.29.2 was built for torch >=2.14.0, but torch 2.13.0 is here",
        f"{PIP} --force-reinstall 'torch>=2.11' 'torchvision>=0.26' 'numpy>=2,<2.5'",
    ),
    "torch damaged": (
        NO_GPU,
        {"import_errors": {"torch": "OSError: libtorch_cpu.so: file too short"}},
        "torch cannot be imported (OSError: libtorch_cpu.so: file too short)",
        f"{PIP} --force-reinstall 'torch>=2.11' 'torchvision>=0.26' 'numpy>=2,<2.5'",
    ),
    "numba damaged on macOS": (
        MAC,
        {"import_errors": {"numba": "ImportError: llvmlite"}},
        "numba cannot be imported (ImportError: llvmlite)",
        f"{PIP} --force-reinstall 'numba>=0.68,<0.69' 'numpy>=2,<2.5'",
    ),
    "CUDA libraries missing": (
        NO_GPU,
        {"toolkit": {"nvvm": None, "nvJitLink": "13.5.37", "nvrtc": None}},
        "the CUDA libraries that compile kernels are missing: nvvm, nvrtc",
        f"{PIP} --force-reinstall 'numba-cuda[cu13]>=0.30,<0.31' 'numba>=0.68,<0.69' "
        "'numpy>=2,<2.5'",
    ),
    "CPU-only torch": (
        GPU,
        {"torch_cuda": None},
        "torch 2.15.0 is a CPU-only build, but there is a GPU here",
        f"{PIP} --force-reinstall 'torch>=2.11' 'torchvision>=0.26' 'numpy>=2,<2.5'",
    ),
    "CPU-only torch on Windows": (
        GPU,
        {"torch_cuda": None, "platform": "win32"},
        "torch 2.15.0 is a CPU-only build",
        "wsl --install",
    ),
    "driver too old": (
        GPU,
        {"driver_cuda": (12, 4)},
        "the NVIDIA driver supports CUDA 12.4, but kernels are compiled for CUDA 13.0",
        "sudo apt install nvidia-driver-580",
    ),
    "driver too old, and it is that of Windows": (
        GPU,
        {"driver_cuda": (12, 4), "platform": "wsl"},
        "the NVIDIA driver supports CUDA 12.4",
        "powershell.exe start https://www.nvidia.com/drivers",
    ),
    "driver that does not start": (
        NO_GPU,
        {"driver_error": 999, "driver_release": "580.65.06"},
        "the NVIDIA driver is installed but does not start (CUDA error 999)",
        "sudo reboot",
    ),
    "GPU too old": (
        GPU,
        {"gpus": (doctor.Gpu("Tesla P100", (6, 0), 17_000_000_000),)},
        "Tesla P100 has compute capability 6.0, but CUDA 13 begins at 7.5",
        "export COURSE_LIB_SIMULATOR=1",
    ),
    "numba.cuda imported first": (
        NO_GPU,
        {"real_cuda_imported": True},
        "numba.cuda was imported before course_lib",
        "import course_lib  # first, in a new session",
    ),
    "others may write to the cache": (
        GPU,
        {"cache_folder": "/c", "cache_fault": ("may be written to by others (mode 777)",
                                               "chmod go-w /c")},
        "the folder of compiled kernels /c may be written to by others (mode 777)",
        "chmod go-w /c",
    ),
    "no such choice": (
        GPU,
        {"variables": {"COURSE_LIB_SIMULATOR": "yes"}},
        "COURSE_LIB_SIMULATOR is 'yes', but must be unset, 0 or 1",
        "unset COURSE_LIB_SIMULATOR",
    ),
    "numba's own simulator": (
        GPU,
        {"variables": {"NUMBA_ENABLE_CUDASIM": "1"}},
        "NUMBA_ENABLE_CUDASIM puts numba's own simulator in the place of the course's",
        "unset NUMBA_ENABLE_CUDASIM",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_thing_is_one_line_with_one_command(name):
    facts, changes, what, command = WRONG[name]
    facts = dataclasses.replace(facts, **changes)
    [problem] = doctor.diagnose(facts)
    assert what in problem.what
    assert problem.command == command
    [line] = [x for x in doctor.report(facts, [problem]).splitlines() if x.startswith("PROBLEM")]
    assert line == f"PROBLEM  {problem.what}. Mend it with:  {command}"


def test_several_wrong_things_are_several_lines():
    changes = {"packages": packages(numpy="2.5.0", jupyterlab="4.1"), "driver_cuda": (12, 0)}
    problems = doctor.diagnose(dataclasses.replace(GPU, **changes))
    assert [problem.subject for problem in problems] == ["jupyterlab", "numpy", "driver"]


def test_an_extra_that_is_missing_is_no_problem():
    here = dict.fromkeys(PACKAGES) | {name: PACKAGES[name] for name in doctor.BASE}
    base = dataclasses.replace(GPU, packages=here, torch_cuda=None, toolkit={})
    assert doctor.diagnose(base) == []
    shown = doctor.report(base, []).splitlines()
    assert [line for line in shown if "Add it" in line] == [
        "Not installed: torch, torchvision, array-api-compat, pyyaml, tqdm: for operators, layers, "
        f"training, and PyTorch as a peer. Add it with:  {PIP} 'course_lib[torch]'",
        "Not installed: numba-cuda: for kernels on a GPU, and `lint`. Add it with:  "
        f"{PIP} 'course_lib[gpu]'",
        "Not installed: jupyterlab, matplotlib, ipykernel, array-api-compat: for lessons in "
        f"JupyterLab, and pictures. Add it with:  {PIP} 'course_lib[lessons]'",
    ]
    assert "Kernels        run in the simulator: numba-cuda is not installed" in shown
    assert not doctor.missing(MAC)  # for which there is no numba-cuda


@pytest.mark.parametrize("changes", [
    {"driver_cuda": (12, 4)},
    {"torch_cuda": None},
    {"gpus": (doctor.Gpu("Tesla P100", (6, 0), 17_000_000_000),)},
])
def test_a_gpu_that_is_not_used_need_not_be_mended(changes):
    facts = dataclasses.replace(GPU, variables={"COURSE_LIB_SIMULATOR": "1"}, **changes)
    assert doctor.diagnose(facts) == []


def test_the_report_tells_where_kernels_run():
    def where(facts, **variables):
        facts = dataclasses.replace(facts, variables=variables)
        return re.search("^Kernels +(.*)$", doctor.report(facts, []), re.MULTILINE)[1]

    assert where(GPU) == "run on the GPU"
    assert where(NO_GPU) == "no GPU: kernels run in the simulator"
    assert where(GPU, COURSE_LIB_SIMULATOR="1").startswith("run in the simulator")
    assert where(NO_GPU, COURSE_LIB_SIMULATOR="0").startswith("compile but cannot run: no GPU")
    hidden = where(NO_GPU, CUDA_VISIBLE_DEVICES="")
    assert hidden == "no GPU with CUDA_VISIBLE_DEVICES='': kernels run in the simulator"


def test_the_report_shows_driver_gpu_and_mps():
    text = doctor.report(GPU, [])
    assert "580.65.06, supports CUDA 13.0" in text
    assert "NVIDIA H200, compute capability 9.0, 140 GiB" in text
    assert "MPS" in doctor.report(MAC, []) and "driver" not in doctor.report(MAC, [])


def test_versions_are_compared_as_numbers():
    assert within("2.4.10", ">=2.4.9,<2.5") and not within("2.5.0rc1", "<2.5")
    assert within("2.15.0+cu132", ">=2.14.0") and not within("0.9", ">=0.11")
    assert within("2.0", "==2.0.0") and not within("2.0", "!=2") and within("1.0", "")


def test_requirements_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def bounds_of(requirements):
        pattern = r"([\w-]+)(?:\[\w+\])?([^;]*)"
        found = (re.match(pattern, requirement).groups() for requirement in requirements)
        return {name: bounds.strip() for name, bounds in found}

    assert bounds_of(project["dependencies"]) == doctor.BASE
    for extra, (_, packages) in doctor.EXTRAS.items():
        assert bounds_of(project["optional-dependencies"][extra]) == packages
    assert doctor.REQUIREMENTS.keys() == PACKAGES.keys()


def test_the_cache_that_others_may_write_to_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    found = cache.fault(cache.cache_folder())
    assert found == ("may be written to by others (mode 777)", f"chmod go-w {tmp_path}")
    tmp_path.chmod(0o700)
    assert cache.fault(cache.cache_folder()) is None


def test_facts_about_this_machine():
    facts = doctor.collect()
    assert facts.python == tuple(sys.version_info[:3])
    assert facts.packages["numba"].startswith("0.68")
    assert not facts.import_errors
    assert bool(facts.gpus) == (facts.driver_cuda is not None)


@pytest.mark.gpu
def test_facts_about_this_gpu():
    facts = doctor.collect()
    assert facts.driver_error == 0 and re.match(r"\d+\.\d+", facts.driver_release)
    assert all(gpu.name and gpu.memory_bytes > 10**9 for gpu in facts.gpus)
    report = doctor.report(facts, doctor.diagnose(facts))
    assert f"GPU 0           {facts.gpus[0].name}, compute capability" in report
    assert "run on the GPU" in report


def run_doctor(*path, **environment):
    paths = os.pathsep.join([*map(str, path), os.environ["PYTHONPATH"]])
    return subprocess.run(
        [sys.executable, "-m", "course_lib"],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_exit_status_tells_whether_all_is_well():
    done = run_doctor()
    assert done.stderr == ""
    assert done.returncode == (0 if "All is well." in done.stdout else 1)
    assert done.returncode == ("PROBLEM" in done.stdout)


def test_it_runs_where_what_is_wrong_breaks_every_import(tmp_path):
    for name in ("numpy", "numba", "torch", "greenlet", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('damaged')", encoding="utf-8")
    done = run_doctor(tmp_path, COURSE_LIB_SIMULATOR="1")
    assert done.returncode == 1
    assert "PROBLEM  torch cannot be imported (ImportError: damaged)" in done.stdout
    assert "PROBLEM  numba cannot be imported" in done.stdout


def test_it_runs_where_the_choice_of_simulator_is_wrong():
    done = run_doctor(COURSE_LIB_SIMULATOR="perhaps")
    assert done.returncode == 1 and "unset COURSE_LIB_SIMULATOR" in done.stdout


def test_other_commands_do_not_hide_a_broken_start(tmp_path):
    (tmp_path / "greenlet.py").write_text("raise ImportError('damaged')", encoding="utf-8")
    command = [sys.executable, "-m", "course_lib", "readme", "--check"]
    environment = {**os.environ, "COURSE_LIB_SIMULATOR": "perhaps"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "COURSE_LIB_SIMULATOR must be unset, 0 or 1" in done.stderr
