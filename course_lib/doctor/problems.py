"""What is wrong, told from the facts alone."""

import os
import re
import shlex
from dataclasses import dataclass

from course_lib.doctor.facts import BASE, EXTRAS, REQUIREMENTS, dotted

#: numba-cuda[cu13] needs a driver for this CUDA version, and it and torch a GPU this recent.
CUDA_NEEDED = (13, 0)
CAPABILITY_NEEDED = (7, 5)
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Missing:
    """An extra that is not installed or not whole, what it is for, and what adds it."""

    extra: str
    packages: list
    purpose: str
    command: str

    def __str__(self):
        return f"{', '.join(self.packages)}: for {self.purpose}. Add it with:  {self.command}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in one sentence, and the one command that mends it."""

    subject: str
    what: str
    command: str

    def __str__(self):
        return f"{self.what}. Mend it with:  {self.command}"


def diagnose(facts):
    """The list of `Problem`s in `facts`, gravest first; empty when all is well."""
    problems = _python_problems(facts)
    problems += _package_problems(facts)
    problems += _import_problems(facts, known={problem.subject for problem in problems})
    problems += _cuda_problems(facts)
    problems += _choice_problems(facts)
    problems += _cache_problems(facts)
    return problems


def missing(facts):
    """The extras that lack packages, as `Missing`; nothing is wrong with that."""
    found = []
    for extra, (purpose, packages) in EXTRAS.items():
        lacking = [name for name in packages if facts.packages.get(name) is None]
        if lacking and not (extra == "gpu" and facts.platform == "darwin"):  # there is none for it
            command = adding(extra, facts.executable, facts.has_pip)
            found.append(Missing(extra, lacking, purpose, command))
    return found


def within(version, bounds):
    """Whether `version` ("2.4.6") lies within `bounds` (">=2,<2.5"); "" allows all."""

    def number(text):
        digits = [int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part]
        return (digits + [0] * 4)[:4]

    holds = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "==": lambda a, b: a == b,
        "!=": lambda a, b: a != b,
        ">": lambda a, b: a > b,
        "<": lambda a, b: a < b,
    }
    clauses = re.findall(r"(>=|<=|==|!=|>|<)\s*([\d.]+)", bounds)
    return all(holds[operator](number(version), number(bound)) for operator, bound in clauses)


def adding(extra, executable, has_pip):
    """The command that installs an extra."""
    return f"{_pip(executable, has_pip)} 'course_lib[{extra}]'"


def _pip(executable, has_pip):
    if " " in executable:  # quotes would keep a shell from reading ~
        executable = shlex.quote(os.path.expanduser(executable))
    return f"{executable} -m pip install" if has_pip else f"uv pip install --python {executable}"


def _install(facts, *packages, option=""):
    extras = {"numba-cuda": "[cu13]"}
    wanted = (f"'{p}{extras.get(p, '')}{REQUIREMENTS[p]}'" for p in packages)
    return " ".join([f"{_pip(facts.executable, facts.has_pip)}{option}", *wanted])


def _install_again(facts, *packages):
    # Everything they need comes anew as well, in its newest version: NumPy's would be too new.
    return _install(facts, *packages, "numpy", option=" --force-reinstall")


def _python_problems(facts):
    if facts.python >= (3, 11):
        return []
    version = ".".join(map(str, facts.python))
    what = f"Python {version} is too old: the course needs 3.11 or newer"
    return [Problem("python", what, "make setup PYTHON=python3.12")]


def _package_problems(facts):
    problems = []
    for package, bounds in REQUIREMENTS.items():
        version = facts.packages.get(package)
        if version is None and package not in BASE or version and within(version, bounds):
            continue
        if version is None:
            what = f"{package} is not installed"
        elif package == "numpy" and not within(version, "<2.5"):
            what = f"numpy {version} is too new: numba-cuda fails when it first compiles a kernel"
        else:
            what = f"{package} {version} is here, but the course needs {bounds}"
        problems.append(Problem(package, what, _install(facts, package)))

    torch = facts.packages.get("torch")
    if torch and facts.packages.get("torchvision") and not within(torch, facts.torchvision_wants):
        what = (
            f"torchvision {facts.packages['torchvision']} was built for torch "
            f"{facts.torchvision_wants}, but torch {torch} is here"
        )
        command = _install_again(facts, "torch", "torchvision")
        problems.append(Problem("torch", what, command))
    return problems


def _import_problems(facts, known):
    problems = []
    for name, error in facts.import_errors.items():
        packages = {"torch": ["torch", "torchvision"], "numba": ["numba", "numba-cuda"]}[name]
        packages = [package for package in packages if facts.packages.get(package)]
        if known.isdisjoint([*packages, "numpy"]):  # else that is the reason, and is told already
            what = f"{name} cannot be imported ({error})"
            problems.append(Problem(name, what, _install_again(facts, *packages)))
    return problems


def _cuda_problems(facts):
    if facts.platform == "darwin":
        return []
    problems = []
    missing = [name for name, found in facts.toolkit.items() if found is None]
    if missing and facts.packages.get("numba-cuda"):
        what = f"the CUDA libraries that compile kernels are missing: {', '.join(missing)}"
        problems.append(Problem("toolkit", what, _install_again(facts, "numba-cuda", "numba")))
    windows = facts.platform in ("win32", "wsl")
    if facts.driver_error not in (0, _NO_DEVICE):
        error = f"CUDA error {facts.driver_error}"
        what = f"the NVIDIA driver is installed but does not start ({error})"
        problems.append(Problem("driver", what, "wsl.exe --shutdown" if windows else "sudo reboot"))
    if facts.simulated:
        return problems
    if facts.driver_cuda and facts.driver_cuda < CUDA_NEEDED:
        what = (
            f"the NVIDIA driver supports CUDA {dotted(facts.driver_cuda)}, "
            f"but kernels are compiled for CUDA {dotted(CUDA_NEEDED)}"
        )
        command = "sudo apt install nvidia-driver-580"
        if windows:
            command = "powershell.exe start https://www.nvidia.com/drivers"
        problems.append(Problem("driver", what, command))
    for gpu in facts.gpus:
        if gpu.compute_capability < CAPABILITY_NEEDED:
            what = (
                f"{gpu.name} has compute capability {dotted(gpu.compute_capability)}, "
                f"but CUDA 13 begins at {dotted(CAPABILITY_NEEDED)}"
            )
            problems.append(Problem("gpu", what, "export COURSE_LIB_SIMULATOR=1"))
    if facts.gpus and facts.packages.get("torch") and facts.torch_cuda is None:
        what = f"torch {facts.packages['torch']} is a CPU-only build, but there is a GPU here"
        command = _install_again(facts, "torch", "torchvision")
        if facts.platform == "win32":  # where the ordinary package has no CUDA
            command = "wsl --install"
        problems.append(Problem("torch", what, command))
    return problems


def _choice_problems(facts):
    problems = []
    choice = facts.variables.get("COURSE_LIB_SIMULATOR", "")
    if choice not in ("", "0", "1"):
        what = f"COURSE_LIB_SIMULATOR is {choice!r}, but must be unset, 0 or 1"
        problems.append(Problem("choice", what, "unset COURSE_LIB_SIMULATOR"))
    if facts.variables.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        what = "NUMBA_ENABLE_CUDASIM puts numba's own simulator in the place of the course's"
        problems.append(Problem("choice", what, "unset NUMBA_ENABLE_CUDASIM"))
    if facts.real_cuda_imported and facts.simulated:
        what = "numba.cuda was imported before course_lib, which needs to put its simulator there"
        problems.append(Problem("choice", what, "import course_lib  # first, in a new session"))
    return problems


def _cache_problems(facts):
    if facts.cache_fault is None:
        return []
    fault, command = facts.cache_fault
    what = f"the folder of compiled kernels {facts.cache_folder} {fault}"
    return [Problem("cache", what, command)]
