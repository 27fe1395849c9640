"""The facts and problems as text."""

from course_lib.doctor.facts import dotted
from course_lib.doctor.problems import missing


def report(facts, problems):
    """What `python -m course_lib` prints: the facts as a table, what is missing, each problem."""
    rows = [("Python", f"{dotted(facts.python)}  {facts.executable}")]
    for package in ("torch", "torchvision", "numba", "numba-cuda", "numpy", "jupyterlab"):
        version = facts.packages.get(package) or "not installed"
        if package == "torch" and facts.packages.get("torch"):
            version += f"  built for {'CUDA ' + facts.torch_cuda if facts.torch_cuda else 'CPU'}"
        rows.append((package, version))
    if facts.packages.get("numba-cuda"):
        parts = [f"{name} {found or 'missing'}" for name, found in facts.toolkit.items()]
        rows.append(("CUDA libraries", ", ".join(parts)))
    if facts.platform != "darwin":
        rows.append(("NVIDIA driver", _driver_line(facts)))
    for index, gpu in enumerate(facts.gpus):
        capability, gibibytes = dotted(gpu.compute_capability), gpu.memory_bytes / 2**30
        line = f"{gpu.name}, compute capability {capability}, {gibibytes:.0f} GiB"
        rows.append((f"GPU {index}", line))
    if facts.mps:
        rows.append(("MPS", "available to torch"))
    rows.append(("Kernels", _where_kernels_run(facts)))

    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines.append("")
    lines += [f"Not installed: {each}" for each in missing(facts)]
    lines += [f"PROBLEM  {problem}" for problem in problems] or ["All is well."]
    return "\n".join(lines)


def _driver_line(facts):
    if facts.driver_cuda is None and facts.driver_release is None:
        return "none"
    cuda = f"supports CUDA {dotted(facts.driver_cuda)}" if facts.driver_cuda else ""
    return ", ".join(part for part in (facts.driver_release, cuda) if part)


def _where_kernels_run(facts):
    choice = facts.variables.get("COURSE_LIB_SIMULATOR", "")
    if choice == "1":
        return "run in the simulator (COURSE_LIB_SIMULATOR=1)"
    if facts.gpus and choice != "0" and not facts.packages.get("numba-cuda"):
        return "run in the simulator: numba-cuda is not installed"
    if facts.gpus:
        return "run on the GPU"
    hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
    reason = "no GPU" if hidden is None else f"no GPU with CUDA_VISIBLE_DEVICES={hidden!r}"
    if choice == "0":
        return f"compile but cannot run: {reason}, and COURSE_LIB_SIMULATOR=0"
    return f"{reason}: kernels run in the simulator"
