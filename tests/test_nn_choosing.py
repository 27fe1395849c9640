"""`replace_layers(keep="faster")`: what is timed, swapped, kept and put back."""

import pytest
import torch
from image_sets import class_folders
from tensors import PLACE, randn
from torch import nn as torch_nn

from course_lib import bench, cli, nn
from course_lib.nn import calls, choosing
from course_lib.nn.layer import Layer
from course_lib.train import checkpoint, fashion_mnist
from course_lib.train.step import arithmetic

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
GAINS = 50.0, 60.0  # µs, ours and PyTorch's


class Clock:
    """Stands in for `choosing.measure`; its times are made up.

    times  {name of PyTorch's class: (ours, PyTorch's) µs, or {way: both}, or an error to raise}
    whole  {number of our layers in the model: µs, or an error}
    runs   whether each candidate is called twice
    """

    def __init__(self):
        self.times, self.whole, self.runs, self.measured = {}, {}, False, []

    def __call__(self, candidates, ways):
        name = candidates["PyTorch"].classes[0][1].__name__
        self.measured.append(name)
        found = {way: {} for way in ways}
        for who, step in candidates.items():
            for i in range(2 * self.runs):
                step(i)
            times = self.times.get(name, (100.0, 100.0))
            if "ours" not in candidates:  # the whole step
                n = sum(issubclass(kind, Layer) for _, kind in step.classes)
                times = self.whole.get(n, 100.0 - n)
            for way in ways:
                both = times.get(way, (100.0, 100.0)) if isinstance(times, dict) else times
                if isinstance(both, Exception):
                    raise both
                us = both[who == "PyTorch"] if isinstance(both, tuple) else both
                found[way][who] = bench.Timing(us, (us * 0.99, us * 1.01))
        return found


@pytest.fixture
def clock(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "_kept", {})
    monkeypatch.setattr(choosing, "why_not_on", lambda place: None)
    monkeypatch.setattr(choosing, "measure", found := Clock())
    return found


def network():
    torch.manual_seed(3)
    layers = [torch_nn.Conv2d(3, 2, 3), torch_nn.BatchNorm2d(2), torch_nn.ReLU(inplace=True)]
    layers += [torch_nn.Flatten(), torch_nn.Dropout(0.5), torch_nn.Linear(8, 2), torch_nn.Tanh()]
    return torch_nn.Sequential(*layers).to(PLACE)


def faster(model, x=None, **options):
    x = randn(2, 3, 4, 4) if x is None else x
    return nn.replace_layers(model, keep="faster", example_inputs=x, **options)


def names(found):
    return [each.name for each in found]


def test_what_gains_over_two_percent_is_swapped(clock):
    clock.times = {"Conv2d": GAINS, "Linear": (97.0, 100.0), "ReLU": (70.0, 60.0)}
    swapped = faster(model := network())
    assert names(swapped.replaced) == ["0"] and type(model[0]) is nn.Conv2d
    assert names(swapped.left) == ["1", "2", "3", "4", "5", "6"]
    assert type(model[5]) is torch_nn.Linear  # 3 %, of which the quartiles take 2
    assert swapped.left[1].reason == "ours takes 70.0 µs and PyTorch's 60.0 µs"
    lines = swapped.table().splitlines()
    assert lines[0].startswith("layer") and lines[0].endswith("PyTorch, python µs  runs")
    assert lines[1].split() == "0 Conv2d 2×3×4×4 float32 50.0 60.0 50.0 60.0 ours".split()
    assert lines[3].split()[-2:] == ["60.0", "PyTorch's"] and "nothing for Tanh" in lines[-2]
    told = "Layers that gain are ours: a step takes 0.10 ms with 1 of 6 ours and 0.10 ms without."
    assert lines[-1] == swapped.note == told
    swapped.restore()
    clock.times = {}
    assert faster(model, randn(1, 3, 4, 4)).note == "Every layer stays PyTorch's: none gains."
    assert type(model[0]) is torch_nn.Conv2d


def test_the_whole_step_decides(clock):
    clock.times = {"Conv2d": GAINS, "Linear": GAINS}
    for us, kept in ((102.5, False), (101.5, True)):
        clock.whole = {2: us}
        swapped = faster(model := network())
        assert names(swapped.replaced) == ["0", "5"] * kept and len(swapped.timed) == 6
        assert isinstance(model[0], Layer) is isinstance(model[5], Layer) is kept
        told = f"a step takes {us / 1e3:.2f} ms with 2 of 6 ours and 0.10 ms without"
        begin = "Layers that gain are ours" if kept else "Every layer stays PyTorch's"
        assert swapped.note == f"{begin}: {told}." and (kept or swapped.left[0].reason == told)
    clock.times, x = {"Conv2d": {"device": GAINS}, "ReLU": GAINS}, randn(1, 3, 4, 4)
    for us, expected in ((90.0, ["0", "2"]), (99.5, ["2"])):
        clock.whole = {2: us}
        assert names(faster(network(), x).replaced) == expected
    clock.times["Linear"] = {"device": RuntimeError("no graph can hold it"), "python": GAINS}
    rows = faster(network(), randn(3, 3, 4, 4)).table().splitlines()
    assert rows[6].split()[:8] == "5 Linear 3×8 float32 – – 50.0 60.0".split()
    captured = faster(network(), x, captured=True)
    assert names(captured.replaced) == ["0", "2"] and list(captured.timed[0].times) == ["device"]


def state_of(model):
    modes = [(type(m), m.training, len(m._forward_hooks)) for m in model.modules()]
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return modes, [x.clone() for x in (*tensors, torch.get_rng_state())]


def test_measuring_leaves_no_trace(clock):
    model, x, called = network()[1:5], randn(2, 2, 2, 2), []
    clock.runs, clock.whole = True, {4: 120.0}
    clock.times = {type(layer).__name__: GAINS for layer in model}
    model(x).sum().backward()
    model[0].register_forward_hook(lambda *_: called.append(1))
    model[2].eval()
    model.register_forward_pre_hook(lambda m, _: setattr(m, "passes", 1))
    before, grads = state_of(model), [p.grad for p in model.parameters()]
    assert faster(model, x).replaced == [] and not hasattr(model, "passes")
    after = state_of(model)
    assert len(called) == 1 + 2 * 2  # the pass that is looked at and the whole step's: no layer's
    assert before[0] == after[0] and all(map(torch.equal, before[1], after[1]))
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


def test_a_layer_is_called_as_the_example_calls_it(clock, monkeypatch):
    relu = torch_nn.ReLU(inplace=True)
    model = torch_nn.Sequential(torch_nn.Linear(3, 4), relu, torch_nn.Linear(4, 4), relu).to(PLACE)
    real, made = choosing._candidates, []
    monkeypatch.setattr(choosing, "_candidates", lambda *a: made.append(real(*a)) or made[-1])
    clock.runs, clock.times = True, {"ReLU": GAINS}
    x = randn(2, 5, 3)[:, 1:]
    swapped = faster(model, x)
    assert [(each.name, each.calls) for each in swapped.timed] == [("0", 1), ("1", 2), ("2", 1)]
    assert swapped.timed[1].times["device"]["ours"].microseconds == 100.0
    assert names(swapped.replaced) == ["1", "3"] and model[3] is model[1] and len(made) == 3
    (again,), _ = made[0]["ours"].given
    assert again.stride() == x.stride() and again.shape == x.shape and not again.requires_grad
    assert again.data_ptr() % 16 == x.data_ptr() % 16 == 12
    assert made[1]["ours"].wanted[0].requires_grad and made[1]["ours"].wanted[0].is_leaf
    outputs = []
    for who, kind in (("PyTorch", torch_nn.Linear), ("ours", nn.Linear)):
        (step := made[2][who])(0)
        outputs.append(step.module(*step.given[0]))
        assert type(step.module) is kind and step.module is not model[2]
    torch.testing.assert_close(*outputs)


def test_tensors_of_a_call_that_are_one_stay_one():
    x, labels = randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.tensor([1, 0])
    call, same, other = (
        calls.Call.of(given, {"y": labels}) for given in ((x, x, x + 1), (x, x, x), (x, x + 1, x))
    )
    (a, b, c), kwargs = call.made()
    assert a is b is not c and torch.equal(kwargs["y"], labels) and a.stride() == x.stride()
    assert str(call) == "2×3×4×5 float32 channels-last" and len({call, same, other}) == 3


def test_a_layer_that_holds_others_is_timed_with_them(clock):
    encoder = torch_nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True).to(PLACE)
    model = torch_nn.Sequential(encoder, torch_nn.Linear(8, 2, device=PLACE))
    clock.times = {"TransformerEncoderLayer": GAINS}
    swapped = faster(model, randn(2, 3, 8))
    assert names(swapped.timed) == ["0", "1"] and names(swapped.left) == ["1"]
    assert type(encoder) is nn.TransformerEncoderLayer and type(encoder.linear1) is nn.Linear
    swapped.restore()
    clock.times = {"TransformerEncoderLayer": ValueError("no\nmore")}
    reasons = {each.name: each.reason for each in faster(model, randn(2, 4, 8)).left}
    assert reasons["0"] == "it failed when it was timed: ValueError: no"
    assert reasons["0.linear1"] == f"'0', which holds it, stays: {reasons['0']}"


def test_times_are_kept_for_the_same_layer_under_the_same_settings(clock, monkeypatch):
    def measured(layer=None, x=None):
        clock.measured.clear()
        faster(layer or torch_nn.ReLU(), randn(2, 3, 4, 4) if x is None else x)
        choosing._kept.clear()
        return len(clock.measured)

    assert measured() == 1 and measured() == 0
    x = randn(2, 3, 4, 4)
    others = [x[:1], x.half(), x.to(memory_format=torch.channels_last), randn(2, 3, 5, 4)[:, :, 1:]]
    for other in (*others, x.clone().requires_grad_()):
        assert measured(x=other) == 1 and measured(x=other) == 0
    for layer in (torch_nn.ReLU(inplace=True), torch_nn.ReLU().eval()):
        assert measured(layer) == 1 and measured(layer) == 0
    for place, name in ((choosing, "sources"), (bench, "versions"), (calls, "autocast_now")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, lambda: "another")
            assert measured() == 1, name
    tried = torch.backends.cudnn.flags(benchmark=True)
    for context in (torch.no_grad(), arithmetic("tf32"), tried):
        with context:
            assert measured() == 1 and measured() == 0
    for path in choosing.cache.cache_folder().iterdir():
        path.write_text(path.read_text()[:-9])
    assert measured() == 1 and measured() == 0 and choosing.cache.clear()[0] > 9
    assert measured() == 1


def test_what_cannot_be_timed_stays(clock):
    clock.times = {"Conv2d": FULL, "ReLU": RuntimeError("broken"), "Linear": GAINS}
    swapped = faster(network())
    reasons = {each.name: each.reason for each in swapped.left}
    assert names(swapped.replaced) == ["5"] and reasons["0"] == "memory ran out when it was timed"
    assert reasons["2"] == "it failed when it was timed: RuntimeError: broken"
    for error, told in ((FULL, "memory ran out when the whole"), (KeyError(1), "failed when it")):
        clock.whole = {1: error}
        swapped = faster(model := network())
        assert told in swapped.note and type(model[5]) is torch_nn.Linear
    means = model[1].running_mean.clone()
    with pytest.raises(ValueError, match="does not take example_inputs, and is as it was: Runtime"):
        faster(model, randn(2, 3, 9, 9))
    assert torch.equal(means, model[1].running_mean) and not model[0]._forward_pre_hooks
    model[2].forward = lambda x: (_ for _ in ()).throw(FULL)
    assert "memory ran out as the model computed the example" in faster(model).note
    model = torch_nn.ModuleDict({"used": torch_nn.ReLU(), "idle": torch_nn.Linear(2, 2)}).to(PLACE)
    model.forward = lambda x, factor: model["used"](x) * factor
    left = faster(model, {"x": randn(2), "factor": 3}).left
    assert left[-1].reason == "the example did not call it"
    model._orig_mod = None
    with pytest.raises(ValueError, match="the model is compiled: choose its layers first"):
        faster(model)
    for options in ({"keep": "fast"}, {"captured": True}, {"keep": "faster"}):
        with pytest.raises(ValueError, match="keep must be|are for keep=|give a batch"):
            nn.replace_layers(network(), **options)


def test_on_a_cpu_the_model_stays(tmp_path, capsys):
    swapped = faster(model := network().cpu(), torch.randn(2, 3, 4, 4))
    why = "our kernels gain on an NVIDIA GPU, and the model is on cpu"
    assert swapped.replaced == swapped.timed == [] and len(swapped.left) == 7
    assert swapped.note == f"Every layer stays PyTorch's: {why}." and swapped.left[0].reason == why
    assert swapped.table().endswith(swapped.note) and type(model[0]) is torch_nn.Conv2d
    root, run = str(class_folders(tmp_path / "set", per_class=5)), str(tmp_path / "run")
    for task in ("leaves --model small_se_net", "images"):
        options = f"train {task} --kernels faster --device cpu --image-size 16 --epochs 1".split()
        assert cli.main([*options, "--data", root, "--output", run + task[:4]]) == 0
        assert f"Every layer stays PyTorch's: {why}.\n" in capsys.readouterr().err
        words = ["--data", root, "--evaluate", f"{run}{task[:4]}/checkpoint.pt", "--device", "cpu"]
        assert cli.main([*options[:2], *words]) == 0


def test_a_run_goes_on_with_the_layers_that_it_began_with(clock, tmp_path):
    clock.times = {"Flatten": GAINS}
    x, y, out = torch.randint(256, (4, 28, 28), dtype=torch.uint8), torch.arange(4), tmp_path / "x"
    options = dict(epochs=1, batch_size=2, device_name="cpu", use_cuda_kernels="faster", output=out)
    model, _ = fashion_mnist.train_fashion_mnist(x, y, x, y, **options)
    ours = [name for name, layer in model.named_modules() if isinstance(layer, Layer)]
    path = out / "checkpoint.pt"
    assert ours and checkpoint.load(path)["settings"]["faster_layers"] == ours
    clock.times = {}
    again, _ = fashion_mnist.train_fashion_mnist(x, y, x, y, resume=True, **options)
    loaded, _ = fashion_mnist.load_fashion_mnist(path, device_name="cpu")
    for other in (again, loaded):
        assert list(map(type, other.modules())) == list(map(type, model.modules()))
    with pytest.raises(ValueError, match='use_cuda_kernels must be True, False or "faster"'):
        fashion_mnist.train_fashion_mnist(x, y, x, y, **options | {"use_cuda_kernels": "fast"})


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_layers_are_timed_on_a_gpu(monkeypatch, tmp_path, captured):
    monkeypatch.setenv("COURSE_LIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "_kept", {})
    monkeypatch.setattr(choosing.Timed, "gains", lambda *_: True)
    model = network()
    model(randn(2, 3, 4, 4)).sum().backward()
    before = state_of(model)
    with torch.autocast("cuda", torch.bfloat16):
        swapped = faster(model, captured=captured)
    assert all(map(torch.equal, before[1], state_of(model)[1])) and len(swapped.timed) == 6
    assert "a step takes" in swapped.note
    times = [both for each in swapped.timed for both in each.times.values()]
    assert all(t.microseconds > 0 for both in times for t in both.values())
