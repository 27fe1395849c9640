"""The promises that every rung keeps, each a function that raises `Broken` where it does not."""

import random
import re

import numpy as np
import torch
from contract import exceptions
from contract.cases import double, truth_of
from contract.held import Broken, require
from contract.memory import (
    Fenced,
    channels_last,
    expanded,
    same_bits,
    shifted,
    sliced,
    transposed,
)
from operands import LAYOUTS

from course_lib import SIMULATED
from course_lib.runtime.host.arrays import ArrayError

STEP = 1e-5  # of finite differences
NONFINITE = (np.nan, np.inf, -np.inf)


def truth(held):
    """Within the dtype's rounding of float64, at several shapes and spreads."""
    held.near_truth("truth", held.inputs, held.result)
    dtypes = {value.dtype for value in held.inputs.values() if torch.is_tensor(value)}
    require(held.result.dtype in dtypes, "truth", f"a result of {held.result.dtype}")
    for draw, shape in enumerate(held.shapes[1:], 1):
        if not held.lean:
            inputs = held.subject.inputs(shape, draw)
            held.near_truth("truth", inputs, held.watch(inputs))


def unchanged(held):
    """Inputs are as they were: each run looks, and this is the first."""
    require(held.result is not None, "unchanged", "there is no result")


def views(held):
    """Transposed and sliced inputs give the bits of contiguous ones, expanded ones the truth."""
    _other_views(held)
    for how in (sliced, transposed):
        found = held.run(held.moved(how))
        require(held.same(found), "views", f"{how.__name__} inputs give other bits")


def layouts(held):
    """Every operand in a layout of its own, drawn by the rung's name: near the truth."""
    subject = held.subject
    generator = random.Random(f"{subject.name} {subject.rung} {subject.dtype}")
    read = subject.read(held.inputs)
    draws = [generator.sample(list(LAYOUTS), len(read)) for _ in range(1 if held.lean else 3)]
    if exceptions.of(held.subject, "layouts"):
        draws = [[name] * len(read) for name in LAYOUTS]
    for names in draws:
        inputs = held.inputs | {
            name: LAYOUTS[layout](x) for (name, x), layout in zip(read.items(), names, strict=True)
        }
        try:
            found = held.run(inputs)
        except ValueError as refusal:  # of a rung that takes 16 bytes at a time
            clear = re.search("use (variant=)?'|use one of", str(refusal))
            require(clear, "layouts", f"unclear: {refusal}")
        else:
            held.near_truth("layouts", inputs, found)


def _other_views(held):
    """Where vectors find no boundary sums may go in another order: no further from the truth."""
    fenced = Fenced(held.result, start=1) if held.of_pass.out else None
    found = held.run(held.moved(shifted), **({"out": fenced.out} if fenced else {}))
    held.near_truth("views", held.inputs, found)
    require(fenced is None or fenced.intact, "views", "memory beside out is written")
    alike = held.moved(expanded)
    held.near_truth("views", alike, held.run(alike))


def formats(held):
    """Channels-last images give the same values; of 16 channels, where vectors need whole ones."""
    inputs = held.inputs if len(held.shapes[0]) == 4 else held.subject.inputs((2, 3, 2, 5))
    try:
        last = held.watch(held.moved(channels_last, inputs))
    except ValueError:
        inputs = held.subject.inputs((1, 16, 2, 4))
        last = held.watch(held.moved(channels_last, inputs))
    held.near_truth("formats", inputs, last)


def nonfinite(held):
    """NaN and infinities come out where the truth has them, or PyTorch does in float32 anywhere."""
    if exceptions.of(held.subject, "nonfinite"):
        places = {"NaN": NONFINITE[:1], "infinities": NONFINITE[1:2]}
        if held.right_of_nan:
            del places["NaN"]
    elif held.lean or not held.of_pass.whole:
        places = {"all": NONFINITE}  # in rows of their own
    else:
        places = {str(value): (value,) for value in NONFINITE}
    for label, values in places.items():
        inputs = _with(values, held)
        _same_kinds(held, "nonfinite", label, inputs, held.run(inputs))


def _with(values, held):
    """The inputs, with these numbers at places far apart in the largest of them."""
    numbers = {k: v for k, v in held.subject.read(held.inputs).items() if v.is_floating_point()}
    name = max(numbers, key=lambda name: numbers[name].numel())
    x = numbers[name].clone()
    for number, value in enumerate(values):
        x.view(-1)[number * x.numel() // len(values) + 1] = value
    return held.inputs | {name: x}


def _same_kinds(held, name, label, inputs, found):
    """Require NaN, inf and −inf where they should be; returns what was found, as float64."""
    wide = [v.float() if torch.is_tensor(v) and v.is_floating_point() else v
            for v in inputs.values()]  # fmt: skip
    at_home = [v.cpu() if torch.is_tensor(v) else v for v in wide]
    allowed = [torch.tensor(truth_of(held.subject, inputs)[0]), held.of_pass.peer(*wide)]
    if not SIMULATED:  # on a GPU PyTorch may multiply by other algorithms, such as Winograd's
        allowed.append(held.of_pass.peer(*at_home))
    allowed = [double(each.to(held.result.dtype)) for each in allowed]
    found = double(found)
    require(any(same_kinds(found, each) for each in allowed), name,
            f"{label} in {tuple(inputs)[0]}: {found}\nfor {allowed[0]}")  # fmt: skip
    return found


def formats_nonfinite(held):
    """`formats` and `nonfinite` by one run where they may, for rungs whose blocks take long."""
    excepted = exceptions.of(held.subject, "nonfinite")
    inputs = _with(NONFINITE[: 1 if excepted else 2], held)
    try:
        found = held.watch(held.moved(channels_last, inputs))
    except ValueError:  # channels-last images of other shapes only
        formats(held)
        return excepted or nonfinite(held)
    found = _same_kinds(held, "nonfinite", "NaN and inf", inputs, found)
    held.right_of_nan = True
    right, (_, scale) = truth_of(held.subject, inputs)[0], truth_of(held.subject, held.inputs)
    finite = np.isfinite(found) & np.isfinite(right)
    if not finite.any():
        return formats(held)
    found, right = (np.where(finite, each, 0.0) for each in (found, right))
    held.near("formats", found, right, scale, held.inputs)


def same_kinds(a, b):
    """Whether NaN, inf and −inf are in the same places."""
    return all(np.array_equal(kind(a), kind(b)) for kind in (np.isnan, np.isposinf, np.isneginf))


def empty(held):
    """Without rows, or without an image, the result is the truth's: empty, or sums of nothing."""
    inputs = held.subject.inputs((0, *held.shapes[0][1:]))
    held.near_truth("empty", inputs, held.run(inputs))


def out(held):
    """`out` is filled, returned, and nothing beside it is touched, wherever it may lie."""
    fenced = Fenced(held.result)
    found = held.run(held.inputs, out=fenced.out)
    _require_written(held, fenced, found)
    _strided_out(held)
    _shared_out(held)


def _require_written(held, fenced, found):
    require(found is fenced.out, "out", "another tensor is returned")
    require(fenced.intact, "out", "memory beside it is written")
    require(held.same(found), "out", "it has other bits")


def _strided_out(held):
    """One with gaps, or turned, is filled and no more; or refused by name and left alone."""
    for fenced in (Fenced(held.result, spread=True), Fenced(transposed(held.result))):
        try:
            found = held.run(held.inputs, out=fenced.out)
        except ArrayError as error:
            require("out" in str(error) and "stride" in str(error), "out", f"unclear: {error}")
            require(fenced.untouched, "out", "refused, and written to")
        else:
            _require_written(held, fenced, found)


def _shared_out(held):
    """In place where that is promised; else memory that is read is refused and left alone."""
    for name, tensor in held.subject.read(held.inputs).items():
        if tensor.shape != held.result.shape or tensor.dtype != held.result.dtype:
            continue
        memory = tensor.new_empty(tensor.numel() + 1)
        itself, beside = memory[:-1].view(tensor.shape), memory[1:].view(tensor.shape)
        for place, written in (("itself", itself), ("beside", beside)):
            itself.copy_(tensor)
            before = memory.clone()
            inputs = held.inputs | {name: itself}
            try:
                found = held.run(inputs, out=written, changed=(name,))
            except ArrayError as error:
                require("share" in str(error), "out", f"unclear: {error}")
                promised = place == "itself" and name in held.of_pass.in_place
                require(not promised, "out", f"{name} is refused, in place")
                require(same_bits(memory, before), "out", f"{name} refused, and written to")
            else:
                require(found is written, "out", f"{name} {place}: another tensor is returned")
                require(held.same(found), "out", f"{name} {place}: other bits")


def bits(held):
    """The same bits again, and whatever the order that threads run in."""
    for order in ("forward", "reverse", "random"):
        found = held.run(held.inputs, order)
        require(held.same(found), "bits", f"others in the order {order}")


def sanitizer(held):
    """The sanitizer finds no race, no read of what nobody wrote, nothing outside an array.

    It watches further shapes in `truth`, and channels-last images in `formats`.
    """
    require(held.watched is not None, "sanitizer", "there is no result")


def numpy(held):
    """NumPy arrays give a NumPy array, of the same bits."""
    found = held.watched
    require(isinstance(found, np.ndarray), "numpy", f"a {type(found).__name__} is returned")
    require(held.same(torch.from_numpy(found)), "numpy", "other bits")


def together(held):
    """`views`, `out` and `bits` by the same runs; where bits differ, each tells for itself."""
    ways = [(sliced, "reverse")]
    if not held.lean:
        ways = [(transposed, "reverse"), (sliced, "random")]
    for how, order in ways:
        fenced = Fenced(held.result) if held.of_pass.out and how is sliced else None
        found = held.run(held.moved(how), order, **({"out": fenced.out} if fenced else {}))
        if not held.same(found):
            for one in (bits, views, out) if held.of_pass.out else (bits, views):
                one(held)
            raise Broken("bits", "others, now and then")
        if fenced:
            _require_written(held, fenced, found)
    if not held.lean:
        _other_views(held)
    if held.of_pass.out:
        _strided_out(held)
        if not held.lean:
            _shared_out(held)


def refused(held):
    """Wrong inputs raise an error that says what came; so does a rung that there is not."""
    found = _error(held, held.inputs, variant="no such rung")
    expected = ("no such rung", *held.of_pass.ladder)
    require(all(name in found for name in expected), "refused", f"an unknown rung: {found}")
    read = held.subject.read(held.inputs)
    for name, tensor in read.items():
        if not tensor.is_floating_point():
            wrong = {"float32": tensor.float()}
        else:
            wrong = {"float64": tensor.double(), "meta": tensor.to("meta")}
        for axis in range(tensor.ndim) if len(read) > 1 else ():
            longer = torch.cat((tensor, tensor.narrow(axis, 0, 1)), axis)
            if _truth_refuses(held, held.inputs | {name: longer}):
                wrong[str(longer.shape[axis])] = longer
        for came, other in wrong.items():
            said = _error(held, held.inputs | {name: other})
            shapes = [str(tuple(each.shape)) for each in read.values()]
            require(any(each in said for each in (came, *shapes)), "refused",
                    f"{name} of {came}: {said}")  # fmt: skip
    if held.of_pass.out:
        out = held.result.new_empty(*held.result.shape, 2)
        for came, wrong in ((str(tuple(out.shape)), out), ("float64", held.result.double())):
            said = _error(held, held.inputs, out=wrong)
            require("out" in said and came in said, "refused", f"out of {came}: {said}")
        if held.result.numel() > 1:
            alike = held.result.new_empty(1).expand(held.result.shape)
            said = _error(held, held.inputs, out=alike)
            require("out" in said, "refused", f"out of one element many times: {said}")


def _error(held, inputs, variant=None, **options):
    """What is said when these are refused."""
    try:
        held.of_pass.ours(*inputs.values(), variant=variant or held.subject.rung, **options)
    except (ArrayError, ValueError) as error:
        return str(error)
    raise Broken("refused", f"taken: {[getattr(v, 'shape', v) for v in inputs.values()]}")


def _truth_refuses(held, inputs):
    """Whether NumPy can't work on such shapes together."""
    try:
        truth_of(held.subject, inputs)
    except (ValueError, IndexError):
        return True
    return False


def gradients(operation, direction):
    """The float64 truth of a backward pass is what finite differences of the forward one give."""
    forward, backward = operation.forward, operation.passes[direction]
    generator = torch.Generator().manual_seed(5)
    shape = (2, 3) if operation.n_dims in (None, 2) else (2, 4, 3, 3)
    x = torch.randn(shape, generator=generator)  # float64 from here on
    given = [double(value) for value in forward.inputs(x).values()]
    saved = [double(value) for value in backward.inputs(x).values()]
    found, at = backward.truth(*saved), 0 if direction == "backward" else 1
    expected = np.empty_like(given[at])
    for place in np.ndindex(expected.shape):
        ends = []
        for step in (-STEP, STEP):
            moved = given[at].copy()
            moved[place] += step
            ends.append((saved[0] * forward.truth(*given[:at], moved, *given[at + 1 :])).sum())
        expected[place] = (ends[1] - ends[0]) / (2 * STEP)
    error = np.abs(found - expected).max() / max(1e-3, np.abs(expected).max())
    require(error < 1e-5, "gradients", f"{error:.1e} from finite differences")


def applies(name, held):
    """Whether the pass promises such a thing at all."""
    of_images = held.subject.operation.n_dims in ((4,) if held.lean else (4, None))
    promised = {
        "out": held.of_pass.out, "formats": of_images, "sanitizer": held.is_watched,
        "numpy": held.is_watched and held.subject.has_numpy,
    }  # fmt: skip
    return promised.get(name, True)


PROPERTIES = (
    truth, unchanged, views, layouts, formats, nonfinite, empty, out, bits, sanitizer,
    numpy, refused,
)  # fmt: skip
BY_NAME = {each.__name__: each for each in PROPERTIES}


def hold(held, names=tuple(BY_NAME)):
    """Hold a subject to the properties named; yields the name of each that is proved."""
    names = [name for name in names if applies(name, held)]
    excepted = [name for name in names if exceptions.of(held.subject, name)]
    together_held = [(together, {"views", "out", "bits"})]
    if held.lean and (len(held.shapes) > 1 or "nonfinite" in excepted):
        together_held.append((formats_nonfinite, {"formats", "nonfinite"}))
    proved = []
    for function, joint in together_held:
        if function is together and joint & set(excepted):
            continue
        joint = joint & set(names) - set(excepted)
        if len(joint) > 1 or (function is formats_nonfinite and joint and "nonfinite" in excepted):
            _try(held, min(joint), function)
            proved += sorted(joint)
    yield from proved
    for name in names:
        if name in excepted:
            _still_broken(held, name)
        elif name not in proved:
            _try(held, name, BY_NAME[name])
            yield name


def _try(held, name, function):
    try:
        function(held)
    except Broken:
        raise
    except Exception as error:
        raise Broken(name, repr(error)) from error


def _still_broken(held, name):
    """Fail unless the property is broken as the exception to it says.

    On a GPU atomics may come in one order by chance: there, nothing is asked.
    """
    if not SIMULATED:
        return
    exception = exceptions.of(held.subject, name)
    try:
        _try(held, name, BY_NAME[name])
    except Broken as error:
        require(exception.says in str(error), name, f"not as excepted, but: {error}")
    else:
        raise Broken(name, f"no exception is needed: {exception}")
