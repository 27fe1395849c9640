"""What `python -m course_lib bench` measures: one file per operation, each with a `run`."""

import inspect
from pathlib import Path

from course_lib.runtime.host import device

#: The files here that name the command which measures what is in them.
BENCHMARKS = tuple(
    file.stem
    for file in sorted(Path(__file__).parent.glob("*.py"))
    if f"python -m course_lib bench {file.stem} " in file.read_text(encoding="utf-8")
)


def refused(benchmark, wanted):
    """Why the `run` of a benchmark does not take what is `wanted`, as a sentence; None if it does.

    wanted  {argument: value}; "shapes" and "dtypes" are for some benchmarks only, and a shape must
            have as many dimensions as the benchmark says in N_DIMS
    """
    if (needed := getattr(benchmark, "N_GPUS", 0)) > device.count():
        return f"it needs {needed} GPUs, and there are {device.count()}"
    parameters = inspect.signature(benchmark.run).parameters
    for name in wanted.keys() - parameters.keys():
        return f"it has no choice of --{name.removesuffix('_folder')}"
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in wanted:
            return f"it needs --{name.removesuffix('_folder')}"
    if wanted.get("rounds", 2) < 2:
        return f"quartiles need two rounds at least; not {wanted['rounds']}"
    if unknown := set(wanted.get("dtypes", ())) - {"float32", "float16", "bfloat16"}:
        return f"--dtypes takes float32, float16, bfloat16; not {', '.join(sorted(unknown))}"
    n_dims = getattr(benchmark, "N_DIMS", None)
    for shape in wanted.get("shapes", ()):
        if n_dims not in (None, len(shape)) or not all(shape):
            kind = f"{n_dims} positive sizes" if n_dims else "positive sizes"
            return f"a shape has {kind} here; not {'x'.join(map(str, shape))}"
    return None


def table(records):
    """The records as text: a line for each, a column for each of its rows."""
    lines = []
    for record in records:
        shape = "x".join(map(str, record["shape"]))
        cells = [f"{row['label']} {_value(row)}" for row in record["rows"]]
        copy = f"copy {record['copy_gbps']:,.0f} GB/s | " if "copy_gbps" in record else ""
        copy += f"link {record['link_gbps']:,.0f} GB/s | " if "link_gbps" in record else ""
        lines.append(f"{record['name']} {shape} {record['dtype']}: {copy}{' | '.join(cells)}")
        left_out = record.get("left_out", {})
        lines += [f"    without {label}: {why}" for label, why in left_out.items()]
    return "\n".join(lines)


def _value(row):
    share = f" ({row['percent_of_copy']:.0f}% of copy)" if "percent_of_copy" in row else ""
    share += f" ({row['tflops']:.1f} TFLOP/s)" if "tflops" in row else ""
    share += f" ({row['images_per_second']:,.0f} images/s)" if "images_per_second" in row else ""
    share += f" ({row['bus_gbps']:.2f} GB/s)" if "bus_gbps" in row else ""
    python = f" ({row['python_microseconds']:.2f} from Python)" if "python_quartiles" in row else ""
    return f"{row['microseconds']:.2f} µs{share}{python}"


def save_plots(records, device, folder):
    """PNGs in `folder` (made if missing): a ladder for each record of device times, named after it,
    and for each operation with rows of several lengths how it fares over them; of squeeze and
    excitation the speed-up at each size, of a network where its time goes.

    device  what `bench.device_facts` says
    """
    from course_lib.benchmarks import pictures

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    groups, blocks = {}, {}
    steps = [record for record in records if record["name"] == "efficientnet.step"]
    if steps:
        pictures.step_times(steps, device["name"]).savefig(folder / "efficientnet.step.png")
    for record in records:
        if "copy_gbps" not in record:
            continue
        if record["name"].startswith("squeeze_excite."):
            blocks.setdefault((record["name"], record["dtype"]), []).append(record)
        shape = "x".join(map(str, record["shape"]))
        figure = pictures.ladder(record, device["name"])
        figure.savefig(folder / f"{record['name']}-{shape}-{record['dtype']}.png")
        if len(record["shape"]) == 2:
            groups.setdefault((record["name"], record["dtype"]), []).append(record)
    for (name, dtype), group in groups.items():
        figure = pictures.sweep(group, device["name"], least_bytes=2 * device["l2_bytes"])
        if figure is not None:
            figure.savefig(folder / f"{name}-{dtype}.png")
    for (name, dtype), group in blocks.items():
        figure = pictures.block_speedups(group, device["name"])
        if figure is not None:
            figure.savefig(folder / f"{name}-{dtype}.png")
