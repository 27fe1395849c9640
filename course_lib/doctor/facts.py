"""The facts about this machine, found without importing anything that could be broken."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.runtime.compile import cache
from course_lib.runtime.host import device
from course_lib.runtime.host.home import home

#: What must be installed; a test keeps it, and `EXTRAS`, in step with pyproject.toml.
BASE = {"numba": ">=0.68,<0.69", "numpy": ">=2,<2.5", "greenlet": ">=3.1", "ml_dtypes": ">=0.5"}
#: What may be: extra -> (what it is for, its packages).
EXTRAS = {
    "torch": (
        "operators, layers, training, and PyTorch as a peer",
        {
            "torch": ">=2.11",
            "torchvision": ">=0.26",
            "array-api-compat": ">=1.12",
            "pyyaml": ">=6",
            "tqdm": ">=4.66",
        },
    ),
    "gpu": ("kernels on a GPU, and `lint`", {"numba-cuda": ">=0.30,<0.31"}),
    "lessons": (
        "lessons in JupyterLab, and pictures",
        {
            "jupyterlab": ">=4.2",
            "matplotlib": ">=3.9",
            "ipykernel": ">=6.29",
            "array-api-compat": ">=1.12",
        },
    ),
}
#: Extra -> modules by which it is missed.
MODULES = {
    "torch": ("torch", "torchvision", "array_api_compat", "yaml", "tqdm"),
    "gpu": ("numba_cuda", "cuda"),
    "lessons": ("matplotlib", "PIL", "IPython", "jupyterlab"),
}
REQUIREMENTS = {
    package: bounds
    for packages in (*(packages for _, packages in EXTRAS.values()), BASE)
    for package, bounds in packages.items()
}
#: The parts of the CUDA toolkit that compile and link a kernel, and the packages they come in.
TOOLKIT = {"nvvm": "nvidia-nvvm", "nvJitLink": "nvidia-nvjitlink", "nvrtc": "nvidia-cuda-nvrtc"}
#: What is imported for a try, each in a process of its own: a crash there is only a fact here.
TRIED_IMPORTS = {"torch": "import torch", "numba": "import numba.cuda"}
ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("COURSE_LIB_SIMULATOR", "NUMBA_ENABLE_CUDASIM", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name, compute capability as (major, minor), and memory in bytes."""

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class Facts:
    """All that `diagnose` and `report` know about a machine."""

    python: tuple[int, ...]
    executable: str  # how a command names this Python
    platform: str  # as sys.platform, or "wsl": Linux there, with the driver of Windows
    packages: Mapping[str, str | None]  # version, or None where it is not installed
    has_pip: bool = True
    torch_cuda: str | None = None  # the CUDA version torch was built for
    torchvision_wants: str = ""  # the torch versions torchvision was built for, as ">=2.14"
    import_errors: Mapping[str, str] = field(default_factory=dict)
    toolkit: Mapping[str, str | None] = field(default_factory=dict)  # None where missing
    driver_release: str | None = None
    driver_cuda: tuple[int, int] | None = None
    driver_error: int = 0  # what cuInit returned
    gpus: tuple[Gpu, ...] = ()
    mps: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    real_cuda_imported: bool = False  # numba.cuda came before course_lib could choose
    cache_folder: str = ""
    cache_fault: tuple[str, str] | None = None  # as `runtime.cache.fault` tells it

    @property
    def simulated(self):
        """Whether kernels run in the simulator."""
        choice = self.variables.get("COURSE_LIB_SIMULATOR", "")
        usable = self.gpus and self.packages.get("numba-cuda")
        return choice == "1" or (choice != "0" and not usable)


def dotted(numbers):
    """(13, 0) as "13.0"."""
    return ".".join(map(str, numbers))


def collect():
    """The `Facts` about this machine. Never raises because of what is broken on it."""
    packages = {name: installed_version(name) for name in REQUIREMENTS}
    import_errors, mps = _try_imports(packages)
    executable, has_pip = this_python()
    return Facts(
        python=tuple(sys.version_info[:3]),
        executable=executable,
        platform="wsl" if "microsoft" in platform.release().lower() else sys.platform,
        packages=packages,
        has_pip=has_pip,
        torch_cuda=_torch_cuda(),
        torchvision_wants=_torchvision_wants(),
        import_errors=import_errors,
        toolkit={name: _toolkit_part(name, package) for name, package in TOOLKIT.items()},
        driver_release=_driver_release(),
        driver_cuda=device.driver_version(),
        driver_error=_driver_error(),
        gpus=tuple(_gpu(index) for index in range(device.count())),
        mps=mps,
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
        real_cuda_imported=_real_cuda_imported(),
        cache_folder=str(cache.cache_folder()),
        cache_fault=cache.fault(cache.cache_folder()),
    )


def installed_version(package):
    """The installed version of `package` as its metadata tells it, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def this_python():
    """How a command names this Python, and whether it has pip."""
    return _short(sys.executable), importlib.util.find_spec("pip") is not None


def _short(executable):
    # Relative where it lies in the project, and with ~ below the home folder: shorter to read,
    # right to type, and a notebook that is stored with it tells nothing of whose machine it was.
    for folder, sign in ((ROOT, Path()), (home(), Path("~"))):
        if Path(executable).is_relative_to(folder):
            return str(sign / Path(executable).relative_to(folder))
    return executable


def _torch_cuda():
    # Read, not imported: a torch whose libraries cannot be loaded still tells what it is.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found and found[1]


def _torchvision_wants():
    try:
        requirements = importlib.metadata.requires("torchvision") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        found = re.match(r"torch\s*\(?\s*([<>=!~][^;)]*)", requirement)
        if found:
            return found[1].strip()
    return ""


def _try_imports(packages):
    # Side by side, since each takes a second or more.
    tries = dict(TRIED_IMPORTS)
    if sys.platform == "darwin":
        tries["torch"] += "; print(torch.backends.mps.is_available())"
    if packages["numba-cuda"] is None:
        tries["numba"] = "import numba"
    try:
        processes = {
            name: subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, code in tries.items()
            if packages[name] is not None
        }
    except OSError:  # a browser has one process
        return {}, False
    errors, mps = {}, False
    for name, process in processes.items():
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            errors[name] = "no answer within two minutes"
            continue
        if process.returncode:
            lines = err.strip().splitlines() or [f"exit status {process.returncode}"]
            errors[name] = lines[-1]
        elif name == "torch":
            mps = out.strip() == "True"
    return errors, mps


def _toolkit_part(name, package):
    # The metadata of a package can outlive its files, so it is the library that is looked for.
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if re.search(rf"{name}.*(\.so|\.dll)", file.name, re.IGNORECASE) and file.locate().exists():
            return importlib.metadata.version(package)
    # numba-cuda also accepts a toolkit from conda or the system.
    try:
        from cuda import pathfinder

        return pathfinder.load_nvidia_dynamic_lib(name).abs_path
    except Exception:  # whatever it raises, it is "not found"
        return None


def _cuda_driver():
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _driver_error():
    driver = _cuda_driver()
    return 0 if driver is None else driver.cuInit(0)


def _driver_release():
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        text = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    return None


def _gpu(index):
    found = device.properties(index)
    return Gpu(found.name, found.compute_capability, found.total_bytes)


def _real_cuda_imported():
    cuda = sys.modules.get("numba.cuda")
    simulator = sys.modules.get("course_lib.simulator")
    return cuda is not None and cuda is not getattr(simulator, "cuda", None)
