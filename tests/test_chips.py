"""What the launchers ask of each chip, with its properties given from outside and without a GPU.

Operations are called on drawn shapes as on a T4, an A100 and so on. Their launches are noted and
not run: no block asks for more shared memory or more threads than the chip has, no cluster is too
large, and no kernel is chosen where it was not compiled for. What a chip lacks is refused in words.
And whatever a rung launches is among the kernels that it names.
"""

import contextlib
import itertools

import compile_gate
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import unread
from test_compiler import specialisations

from course_lib.kernels import (
    activation,
    attention,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    dice,
    dropout,
    global_avg_pool,
    linear,
    max_pool2d,
    optimizers,
    scaled_softmax,
    softmax,
    softmax_dropout,
    squeeze_excite,
    upsample,
)
from course_lib.kernels.max_pool2d.fixed import WIDE_WINDOWS, WINDOWS
from course_lib.operations import OPERATIONS as KNOWN
from course_lib.runtime.host.launch import Chip, most_blocks_in_cluster, planning, recorded

CHIPS = (
    Chip((7, 5), 64 << 10, 40, 4 << 20, "T4"),
    Chip((8, 0), 163 << 10, 108, 40 << 20, "A100"),
    Chip((8, 6), 99 << 10, 72, 6 << 20, "A10"),
    Chip((8, 9), 99 << 10, 58, 48 << 20, "L4"),
    Chip((9, 0), 227 << 10, 132, 50 << 20, "H100"),
    Chip((10, 0), 227 << 10, 148, 126 << 20, "B200"),
    Chip((12, 0), 99 << 10, 170, 96 << 20, "RTX 5090"),
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RESERVED = 1024  # bytes that Hopper and later chips count as a kernel's own where it has any
MOST = 1 << 26  # elements of a drawn tensor, whose memory nobody touches


@pytest.fixture(scope="module")
def made_for():
    """{kernel: its labels} of all that is compiled, and {label: {chip: what it became}}."""
    labels = {}
    for name in compile_gate.modules():
        for label, kernel, _ in specialisations(name):
            labels.setdefault(kernel, []).append(label)
    return labels, {label: found for label, (_, found) in compile_gate.load().items()}


def fixed_bytes(found, chip):
    """Shared memory of a kernel's fixed arrays; on a chip it was not compiled for, as on Hopper."""
    if chip.capability in found or compile_gate.HOPPER not in found:
        return getattr(found.get(chip.capability), "shared_bytes", None)
    elsewhere = found[compile_gate.HOPPER].shared_bytes or 0
    return max(0, elsewhere - (RESERVED if chip.capability < compile_gate.HOPPER else 0))


def faults(chip, launches, made_for):
    """What is wrong with these launches on the chip, in words."""
    labels, known = made_for
    for kernel, _, block, _, options in launches:
        names = [name for name in labels[kernel] if compile_gate.runs_on(name, chip.capability)]
        if not names:
            yield f"{labels[kernel][0]} is not made for {chip.name}"
        dynamic = options.get("shared_bytes", 0)
        least = RESERVED if dynamic and chip.capability >= compile_gate.HOPPER else 0
        fixed = (fixed_bytes(known[name], chip) for name in names if name in known)
        n_bytes = dynamic + max((n or least for n in fixed), default=least)
        if n_bytes > chip.shared_bytes:
            yield f"{names} takes {n_bytes:,} bytes on {chip.name}, which has {chip.shared_bytes:,}"
        block = block if isinstance(block, tuple) else (block,)
        n_threads = torch.Size(block).numel()
        if not 0 < n_threads <= 1024:
            yield f"{names} has blocks of {block} on {chip.name}"
        if options.get("cluster", 1) > most_blocks_in_cluster(chip.capability):
            yield f"{names} has clusters of {options['cluster']} on {chip.name}"


# ---- what rungs launch, and what they name ------------------------------------------------------

#: {id of a ladder: [(its name, operation, pass) of those that climb it]}
LADDERS = {}
for _name, _operation in KNOWN.items():
    for _direction, _pass in _operation.passes.items():
        of_ladder = LADDERS.setdefault(id(_pass.ladder), [])
        of_ladder.append((f"{_name}.{_direction}", _operation, _pass))
#: Of inputs, by dimensions: odd ones, and what tensor cores, large blocks and clusters are for.
SHAPES = {
    2: [(2, 8), (3, 50), (64, 64), (300, 520), (4, 9000), (2, 40_000)],
    4: [(2, 3, 9, 11), (2, 4, 1, 5), (3, 16, 16, 16), (2, 64, 28, 28), (40, 96, 7, 7),
        (2, 5, 40, 70), (1, 2, 300, 150)],
}  # fmt: skip


class Watch:
    """Which ways were launched; and that each launch is of a kernel that its way names.

    A rung that is its own way counts as one.
    """

    def __init__(self):
        self.ways, self.now = set(), set()  # at all, and in the call that is planned

    def around(self, way):
        """`way.launch`, watched."""
        launch = way.launch

        def watched(*args, **options):
            with recorded() as launches:
                found = launch(*args, **options)
            self.now.add(way)
            require_named(launches, [way])
            return found

        return watched

    @contextlib.contextmanager
    def planning(self, chip):
        """As `launch.planning`; what a function launches beside its ways, one of them names."""
        self.now = set()
        with planning(chip) as launches:
            yield launches
        self.ways |= self.now
        require_named(launches, self.now)


def require_named(launches, ways):
    unnamed = {kernel for kernel, *_ in launches}.difference(*(way.kernels for way in ways))
    unnamed = [f"{k.py_func.__module__}.{k.py_func.__qualname__}" for k in unnamed]
    assert not unnamed, f"{[way.name for way in ways]} launch {unnamed}, and do not name it"


def ways_of(ladder):
    """{name: what launches}: each rung that does by itself, and each way of one."""
    named = {name: ladder.named(name) for name in ladder.variants}
    alone = {
        name: way if way.launch or len(way.ways) > 1 else way.ways[0] for name, way in named.items()
    }
    return {name: way for name, way in alone.items() if way.launch}


@pytest.fixture
def watch(monkeypatch):
    found = Watch()
    for (_, _, one), *_ in LADDERS.values():
        for way in ways_of(one.ladder).values():
            monkeypatch.setattr(way, "launch", found.around(way))
    return found


@pytest.mark.parametrize("climbing", LADDERS.values(), ids=lambda climbing: climbing[0][0])
def test_a_way_names_every_kernel_that_it_launches(climbing, watch):
    for _, operation, one in climbing:
        for inputs in inputs_of(operation, one):
            for chip in CHIPS[:2] + CHIPS[4:5]:
                for variant in dict.fromkeys((*one.variants, *ways_of(one.ladder))):
                    with contextlib.suppress(ValueError), watch.planning(chip):  # or it is refused
                        one.ours(*inputs, variant=variant)
    ladder = climbing[0][2].ladder
    if climbing[0][1].module is conv2d:
        join_groups(watch)
    assert [name for name, way in ways_of(ladder).items() if way not in watch.ways] == []


def join_groups(watch):
    """Convolutions with groups, which no operation's passes have: a NaN leaves its own group."""
    for dtype, C, layout, chip in itertools.product(
        (torch.float32, torch.bfloat16), (6, 16),
        (torch.contiguous_format, torch.channels_last), (CHIPS[1], CHIPS[4]),
    ):  # fmt: skip
        x = torch.empty(1, C, 4, 4, dtype=dtype).to(memory_format=layout)
        weight = torch.empty(C, C // 2, 3, 3, dtype=dtype)
        options = dict(padding=1, groups=2, variant="tensor_core/block_diagonal", precision="tf32")
        with watch.planning(chip):
            conv2d.backward(conv2d.forward(x, weight, **options), x, weight, **options)


def inputs_of(operation, one):
    """What `one`, a pass, takes: of each shape and dtype, images in both memory formats."""
    for shape in SHAPES[operation.n_dims or 2]:
        if operation.module is linear and shape[-1] > 1000:
            continue  # its weights would be too many
        for dtype in operation.dtypes:
            x = torch.randn(shape).to(getattr(torch, dtype))
            yield one.inputs(x).values()
            if len(shape) == 4:
                yield one.inputs(x.contiguous(memory_format=torch.channels_last)).values()


# ---- one call of each operation, on a shape that is drawn ---------------------------------------


def sizes(most):
    """1 … most, small ones as often as large ones, multiples of 8 as often as others."""
    powers = st.integers(0, most.bit_length() - 1)
    near = st.builds(lambda p, part: min(most, (1 << p) + part % (1 << p)), powers, st.integers(0))
    return near | near.map(lambda n: min(most, -(-n // 8) * 8))


def images(draw, channels=None):
    """An (N, C, H, W) tensor, contiguous or channels-last."""
    C = draw(sizes(2048)) if channels is None else channels
    H, W = draw(sizes(256)), draw(sizes(256))
    N = draw(sizes(max(1, min(1024, MOST // (C * H * W)))))
    return empty(draw, N, C, H, W)


def empty(draw, *shape):
    last = len(shape) == 4 and draw(st.booleans())
    kind = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=draw(st.sampled_from(DTYPES)), memory_format=kind)


def rows(draw, most=1 << 20):
    n_cols = draw(sizes(most))
    return empty(draw, draw(sizes(max(1, min(4096, MOST // n_cols)))), n_cols)


def a_variant(draw, ladder):
    """AUTO as often as all that can be asked for by name."""
    return draw(st.sampled_from(("auto",) * len(ladder.variants) + ladder.variants))


@contextlib.contextmanager
def unless_refused(variant):
    """A variant that is asked for by name may say what it can't do; AUTO finds one that can."""
    try:
        yield
    except ValueError as error:
        assert variant != "auto" and ": use one of " in str(error), error


def activations(draw):
    x, found = rows(draw), activation.OPERATIONS[draw(st.sampled_from([*activation.OPERATIONS]))]
    found.backward(x, found.forward(x))


def pooling(draw):
    x = images(draw)
    y = global_avg_pool.forward(x)
    global_avg_pool.backward(y, x.shape[2:], channels_last=draw(st.booleans()))


def softmaxes(draw):
    found = softmax.OPERATIONS[draw(st.sampled_from(sorted(softmax.OPERATIONS)))]
    x, axis = rows(draw), draw(st.sampled_from((-1, -1, 0)))
    forward, backward = (a_variant(draw, each) for each in (found.FORWARD, found.BACKWARD))
    with unless_refused(forward):
        found.forward(x, axis=axis, variant=forward)
    with unless_refused(backward):
        found.backward(x, x, axis=axis, variant=backward)


def softmaxes_with_dropout(draw):
    x = rows(draw)
    z, stats = softmax_dropout.forward(x, 0.5, 1, 0)[:2]
    softmax_dropout.backward(z, x, stats, 0.5, 1, 0)


def scaled_softmaxes(draw):
    H, T, S = draw(sizes(8)), draw(sizes(64)), draw(sizes(1 << 15))
    x = empty(draw, draw(sizes(4)), H, T, S)
    kind = draw(st.sampled_from((None, torch.bool, x.dtype)))
    options = dict(causal=draw(st.booleans()), variant=a_variant(draw, scaled_softmax.FORWARD))
    with unless_refused(options["variant"]):
        y = scaled_softmax.forward(x, kind and torch.empty(T, S, dtype=kind), **options)
        scaled_softmax.backward(y, y, **options)


def dropouts(draw):
    seed = torch.ones(1, dtype=torch.int64) if draw(st.booleans()) else 1
    dropout.forward(rows(draw), 0.5, seed, draw(st.sampled_from((0, 13))))


def normalised_softmaxes(draw):
    x = rows(draw, 1 << 17)
    parameters = [torch.empty(x.shape[1]) for _ in range(4)]
    y = bn_relu_softmax.forward(x, *parameters)
    bn_relu_softmax.backward(y, y, x, *parameters)


def cross_entropies(draw):
    logits = images(draw) if draw(st.booleans()) else rows(draw)
    target = torch.empty(logits.shape[0], *logits.shape[2:], dtype=torch.int64)
    options = dict(label_smoothing=draw(st.sampled_from((0.0, 0.1))))
    loss, stats, normaliser = cross_entropy.forward(logits, target, **options)
    cross_entropy.backward(loss, logits, target, stats, normaliser, **options)


def batch_norms(draw):
    x = images(draw)
    if x.numel() == x.shape[1]:  # no variance
        x = x.new_empty(2, *x.shape[1:])
    parameters = [torch.empty(x.shape[1]) for _ in range(4)]
    batch_norm.inference(x, *parameters)
    y, mean, rstd = batch_norm.forward(x, *parameters)[:3]
    batch_norm.backward(y, x, parameters[0], mean, rstd)


def max_pooling(draw):
    x = images(draw)
    least = min(x.shape[2:])
    known = *WINDOWS, *WIDE_WINDOWS
    usual = [window for window in known if window.kernel <= least + 2 * window.padding]
    size = draw(st.integers(1, min(7, least)))
    window = size, draw(st.integers(1, 3)), draw(st.integers(0, size // 2))
    size, stride, padding = draw(st.sampled_from((window, *usual)))
    options = dict(stride=stride, padding=padding, ceil_mode=draw(st.booleans()))
    index_dtype = draw(st.sampled_from(("int32", "uint8")))
    y, indices = max_pool2d.forward(x, size, index_dtype=index_dtype, **options)
    max_pool2d.backward(y, indices, x.shape, size, **options)


def linears(draw):
    n_in, n_out = draw(sizes(8192)), draw(sizes(8192))
    x = empty(draw, draw(sizes(8192)), n_in)
    weight, bias = torch.empty(n_out, n_in, dtype=x.dtype), torch.empty(n_out, dtype=x.dtype)
    precision = draw(st.sampled_from(("float32", "tf32")))
    forward, backward = (a_variant(draw, each) for each in (linear.FORWARD, linear.BACKWARD))
    with unless_refused(forward):
        linear.forward(x, weight, bias, precision=precision, variant=forward)
    dy = x.new_empty(x.shape[0], n_out)
    with unless_refused(backward):
        linear.backward(dy, x, weight, precision=precision, variant=backward)


def attentions(draw):
    share, G, B = draw(st.integers(1, 4)), draw(sizes(4)), draw(sizes(4))
    T, S, D = draw(sizes(512)), draw(sizes(512)), draw(sizes(256) | st.sampled_from((64, 128)))
    E = D if draw(st.booleans()) else draw(sizes(256))
    q = empty(draw, B, share * G, T, D)
    k, v = (torch.empty(B, G, S, n, dtype=q.dtype) for n in (D, E))
    forward, backward = (a_variant(draw, each) for each in (attention.FORWARD, attention.BACKWARD))
    options = dict(causal=draw(st.booleans()), dropout_p=draw(st.sampled_from((0.0, 0.1))))
    if draw(st.booleans()):
        mask = torch.empty(B, 1, T, S, dtype=draw(st.sampled_from((torch.bool, q.dtype))))
        options["mask"] = mask
    elif B == 1 and draw(st.booleans()):
        starts = torch.zeros(3, dtype=torch.int32)
        options |= dict(q_starts=starts, k_starts=starts, max_q=T, max_k=S)
    with unless_refused(forward):
        attention.forward(q, k, v, variant=forward, **options)
    saved = torch.empty(*q.shape[:3], E, dtype=q.dtype), torch.empty(q.shape[:3])
    needs = options.get("mask") is not None and options["mask"].dtype != torch.bool
    # Packed sequences with large heads have no way on a chip of little shared memory.
    with unless_refused("tiled" if "max_q" in options and D + E > 128 else backward):
        attention.backward(
            saved[0], q, k, v, *saved, mask_gradient=needs, variant=backward, **options
        )


def optimisers(draw):
    parameters = [torch.zeros(draw(sizes(1 << 12)), dtype=draw(st.sampled_from(DTYPES)))]
    found_inf = torch.zeros(1) if draw(st.booleans()) else None
    optimizers.sgd(parameters, parameters, lr=0.1, found_inf=found_inf)
    moments, steps = [torch.zeros_like(parameters[0])], [torch.zeros(())]
    states = moments, moments, steps
    optimizers.adam(parameters, parameters, *states, lr=0.1, found_inf=found_inf)


def convolutions(draw):
    groups = draw(st.sampled_from((1, 1, 1, 2, 8)))
    C, K = groups * draw(sizes(512)), groups * draw(sizes(512))
    if first := draw(st.sampled_from((0, 0, 3, 5, 7))):  # a network's first layer
        C, groups = draw(st.integers(1, 4)), 1
    x = images(draw, C)
    R, S = (first or draw(st.integers(1, min(11, 1 + size))) for size in x.shape[2:])
    places = x.shape[0] * (x.shape[2] + 3) * (x.shape[3] + 3)  # of y at most, which memory holds
    K = groups * max(1, min(K, MOST // places) // groups)
    weight = torch.empty(K, C // groups, R, S, dtype=x.dtype)
    options = dict(
        stride=draw(st.integers(1, 3)), groups=groups,
        padding=(0, 0) if (R, S) == (1, 1) else (R // 2 + 1, S // 2 + 1),
        precision=draw(st.sampled_from(("float32", "tf32"))),
    )  # fmt: skip
    y = conv2d.forward(x, weight, torch.empty(K, dtype=x.dtype), **options)
    conv2d.backward(y, x, weight, **options)


def transposed_convolutions(draw):
    groups = draw(st.sampled_from((1, 1, 1, 2, 8)))
    C, K = groups * draw(sizes(512)), groups * draw(sizes(512))
    x = empty(draw, draw(sizes(64)), C, draw(sizes(64)), draw(sizes(64)))
    R, S, stride = (draw(st.integers(1, most)) for most in (5, 5, 3))
    if draw(st.booleans()):  # a network's layer that doubles the size
        R, S, stride = 2, 2, 2
    weight = torch.empty(C, K // groups, R, S, dtype=x.dtype)
    options = dict(
        stride=stride, padding=((R - 1) // 2, (S - 1) // 2), groups=groups,
        precision=draw(st.sampled_from(("float32", "tf32"))),
    )  # fmt: skip
    y = conv_transpose2d.forward(x, weight, torch.empty(K, dtype=x.dtype), **options)
    conv_transpose2d.backward(y, x, weight, **options)


def dice_losses(draw):
    logits = images(draw)
    target = torch.empty(logits.shape[0], *logits.shape[2:], dtype=torch.int64)
    loss, factors = dice.forward(logits, target)
    dice.backward(loss, logits, target, factors)


def upsampling(draw):
    x = images(draw)
    options = dict(mode=draw(st.sampled_from(upsample.MODES)), align_corners=draw(st.booleans()))
    most = max(1, MOST // (x.shape[0] * x.shape[1]))  # pixels of an image that memory holds
    H = draw(sizes(min(256, most)))
    y = upsample.forward(x, (H, draw(sizes(max(1, min(256, most // H))))), **options)
    upsample.backward(y, tuple(x.shape), **options)


def squeezing_and_exciting(draw):
    x = images(draw)
    R, dtype = draw(sizes(128)), draw(st.sampled_from((x.dtype, torch.float32)))
    weights = [torch.empty(shape, dtype=dtype) for shape in ((R, x.shape[1]), (R,))]
    weights += [torch.empty(shape, dtype=dtype) for shape in ((x.shape[1], R), (x.shape[1],))]
    variant = draw(st.sampled_from(("auto", "auto", "two_pass", "fused", "resident", "batched")))
    both = variant if variant != "batched" else "auto"
    try:
        y, *saved = squeeze_excite.forward(x, *weights, variant=variant)
        squeeze_excite.backward(y, x, weights[0], weights[2], *saved, variant=both)
    except ValueError as error:
        refused = "needs compute capability 9.0", "use variant='auto'", "use 'two_pass'"
        assert variant in ("fused", "resident", "batched")
        assert any(text in str(error) for text in refused)


OPERATIONS = tuple(unread(each) for each in (
    activations, pooling, softmaxes, softmaxes_with_dropout, scaled_softmaxes, dropouts,
    normalised_softmaxes, cross_entropies, dice_losses, batch_norms, max_pooling, linears,
    attentions, optimisers, convolutions, transposed_convolutions, squeezing_and_exciting,
    upsampling,
))  # fmt: skip
#: Launched in blocks of a size that every chip takes, without shared memory of a launcher's choice.
LEFT_OUT = {"all_reduce", "batches"}


CALLED = {
    activation, attention, batch_norm, bn_relu_softmax, conv2d, conv_transpose2d, cross_entropy,
    dice, dropout, global_avg_pool, linear, max_pool2d, optimizers, scaled_softmax, softmax,
    softmax_dropout, squeeze_excite, upsample,
}  # fmt: skip


def as_registered(operation):
    """A function that calls all passes of an operation, by what `course_lib.operations` says."""

    def call(draw):
        n_dims = operation.n_dims or draw(st.integers(1, 3))
        x = empty(draw, *(draw(sizes(64)) for _ in range(n_dims - 1)), draw(sizes(1 << 14)))
        x.fill_(1)  # what is made of x must be finite
        for one in operation.passes.values():
            inputs = one.inputs(x).values()
            one.ours(*inputs)

    call.__name__ = operation.module.__name__.rpartition(".")[2]
    return call


#: What no function above calls.
OTHERS = [as_registered(each) for each in KNOWN.values() if each.module not in CALLED]


def test_every_operation_is_called():
    called = {module.__name__.rpartition(".")[2] for module in CALLED}
    called |= {each.__name__ for each in OTHERS}
    assert called | LEFT_OUT == set(compile_gate.modules())


@pytest.mark.parametrize(
    "operation", [*OPERATIONS, *OTHERS], ids=lambda operation: operation.__name__
)
def test_no_launch_asks_for_more_than_the_chip_has(operation, made_for, watch):
    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data):
        drawn = []

        def draw(strategy):
            drawn.append(data.draw(strategy))
            return drawn[-1]

        for chip in CHIPS:
            with watch.planning(chip) as launches:
                operation(draw)
            assert [] == list(faults(chip, launches, made_for))
            again = iter(drawn)
            draw = lambda strategy, again=again: next(again)  # noqa: E731 - the same for all chips

    check()


@pytest.mark.parametrize("precision, dtype", [("float32", 0), ("tf32", 0), ("float32", 2)])
def test_every_convolution_of_a_u_net_fits_on_hopper(precision, dtype, made_for, watch):
    for level in range(5):
        size, C = 128 >> level, 64 << level
        for N, (c_in, c_out) in itertools.product((4, 8, 16), ((C, C), (2 * C, C), (C // 2, C))):
            x = torch.empty(N, c_in, size, size, dtype=DTYPES[dtype])
            x = x.to(memory_format=torch.channels_last)
            weight = torch.empty(c_out, c_in, 3, 3, dtype=x.dtype)
            with watch.planning(CHIPS[4]) as launches:
                y = conv2d.forward(x, weight, padding=1, precision=precision)
                conv2d.backward(y, x, weight, padding=1, precision=precision)
            assert not list(faults(CHIPS[4], launches, made_for))


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_hopper_alone_multiplies_by_warpgroups(chip):
    """What an instruction of Hopper does there, others do by an older one, later chips as well."""
    x, weight = (torch.empty(4096, 4096, dtype=torch.float16) for _ in range(2))
    with planning(chip) as launches:
        linear.forward(x, weight)
    ((kernel, *_),) = launches
    older = "vectorised_kernel" if chip.capability < (8, 0) else "tensor_core_kernel"
    expected = "streaming_kernel" if chip.name == "H100" else older
    assert kernel.py_func.__name__ == expected
    if chip.name == "T4":
        refusal = "needs .* 8.0, and this GPU has 7.5: use one of .*, vectorised"
        with planning(chip), pytest.raises(ValueError, match=refusal):
            linear.forward(x, weight, variant="tensor_core")
