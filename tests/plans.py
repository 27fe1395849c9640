"""What a plan costs, by its launches alone; and calls of every operation, on extents from outside.

A launch's work is counted in bytes: of the arrays that it is given, or its multiply-adds, RIDGE to
a byte, if those are more. A pass costs that of all launches, each divided by the share of the
multiprocessors that have a block.
"""

import inspect
import math
from functools import partial
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

from course_lib.kernels import (
    activation,
    attention,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    dice,
    global_avg_pool,
    layer_norm,
    linear,
    max_pool2d,
    softmax,
    softmax_dropout,
    squeeze_excite,
    upsample,
)
from course_lib.runtime.host.launch import planning

RIDGE = 60  # multiply-adds that tensor cores do while a byte is read
#: Files of kernels that read an element at a time; others where FLAGS among their arguments say so.
BY_ELEMENT = (
    "conv2d.implicit_gemm", "conv2d.implicit_dweight", "conv2d.direct", "conv2d.depthwise",
    "conv_transpose2d.direct", "batch_norm.ladder", "max_pool2d.ladder", "softmax_dropout.ladder",
    "bn_relu_softmax.ladder", "attention.streaming", "attention.products",
)  # fmt: skip
FLAGS = "vectors", "whole"


def _in_order(x, memory_format=torch.contiguous_format):
    order = dict(memory_format=memory_format)
    return x if x.is_contiguous(**order) else torch.empty_like(x, **order)


#: Within it, copies of tensors have a place and no content: what a plan launches reads none.
unread = mock.patch.multiple(torch.Tensor, contiguous=_in_order, copy_=lambda x, *_, **__: x)


class Launch(NamedTuple):
    """A launch as it was planned; `a` are its arguments, `s` what its kernel's factory fixed."""

    kernel: str
    blocks: int
    cluster: int
    a: dict
    s: dict

    @property
    def bytes(self):
        return bytes_of({id(t): t for t in self.a.values() if torch.is_tensor(t)}.values())

    @property
    def is_narrow(self):
        """Whether it moves less than 8 bytes at a time."""
        gathered = any("_fetch_any" in repr(self.s.get(f"first_{side}")) for side in "ab")
        by_element = self.kernel.rpartition(".")[0] in BY_ELEMENT
        by_element |= self.s.get("wide") is False  # `conv2d.depthwise_windows`
        return gathered or by_element or any(self.a.get(flag) is False for flag in FLAGS)

    @property
    def multiply_adds(self):
        """Those that are executed, beyond tiles' edges too; 0 where it is no product of tiles."""
        a, s, file = self.a, self.s, self.kernel.rpartition(".")[0]
        tile = s.get("TILE_M", s.get("rows", 128)) * s.get("TILE_N", s.get("columns", 128))
        chunk = 128 // next(t for t in a.values() if torch.is_tensor(t)).itemsize
        if file.startswith("gemm.") and "b_k" in a or file == "gemm.warpgroup":
            return self.blocks // a.get("n_splits", 1) * tile * up(a["K"], s.get("TILE_K", chunk))
        if file in ("conv2d.implicit_gemm", "conv2d.channels_last"):
            return self.blocks * tile * up(a["n_channels"] * a["R"] * a["S"], 32)
        if file in ("conv2d.implicit_dweight", "conv2d.group_sums") and "length" in a:
            return self.blocks * tile * a["length"]
        if file == "conv2d.gather":
            z = a["z"]
            n_terms = up(z.taps_h * z.taps_w * z.n_channels // z.n_residues, chunk)
            return self.blocks // z.n_splits * tile * n_terms
        if file in ("conv2d.warpgroup", "conv2d.warpgroup_mixed"):
            return a["n_tiles"] * tile * a["n_taps"] * a["n_chunks"] * chunk
        if file == "conv2d.halo":
            return self.blocks // self.cluster * tile * a["all_taps"] * a["all_chunks"] * chunk
        if file == "conv2d.pixel_sums" and "dy" in a:
            return up(a["C"] * a["R"] * a["S"], s["TILE_M"]) * up(a["K"], s["TILE_N"]) * a["n_all"]
        return 0

    @property
    def work(self):
        return max(self.bytes, self.multiply_adds / RIDGE)


class Pass(NamedTuple):
    """A pass as it was planned, beside the bytes and multiply-adds that it can't do without."""

    launches: list
    bytes: int
    multiply_adds: int

    @property
    def least(self):
        return max(self.bytes, self.multiply_adds / RIDGE)

    def excess(self, chip):
        """What it costs, for what it would have to."""
        found = sum(e.work / min(1, e.blocks / chip.multiprocessors) for e in self.launches)
        return found / self.least


def up(n, multiple):
    return math.ceil(n / multiple) * multiple


def bytes_of(tensors):
    return sum(t.numel() * t.itemsize for t in tensors)


def passes(operation, chip, make, extents):
    """{name: Pass} of a call of all passes of an operation; `make(*shape)` makes its tensors."""
    found = {}
    with planning(chip) as launches, unread:

        def run(name, function, *tensors, multiply_adds=0):
            first, result = len(launches), function()
            mine = [_launch(*each) for each in launches[first:]]
            found[name] = Pass(mine, bytes_of(tensors), multiply_adds)
            return result

        operation(run, make, *extents)
    return found


def _launch(kernel, grid, block, args, options):
    f = kernel.py_func
    name = f"{f.__module__.removeprefix('course_lib.kernels.')}.{f.__name__}"
    args = (arg.item() if isinstance(arg, np.generic) else arg for arg in args)
    arguments = dict(zip(f.__code__.co_varnames[: f.__code__.co_argcount], args, strict=True))
    fixed = {k: getattr(v, "py_func", v) for k, v in inspect.getclosurevars(f).nonlocals.items()}
    blocks = math.prod(grid) if isinstance(grid, tuple) else int(grid)
    return Launch(name, blocks, options["cluster"], arguments, fixed)


# ---- the operations: function(run, make, *extents) ----------------------------------------------


def _two(forward, backward, reads=2):
    """Of x alone: forward(x, *four of its columns' or channels'), backward(x, y, *four)."""

    def call(run, make, *shape):
        x, four = make(*shape), [torch.empty(shape[1]) for _ in range(4)]
        y = run("forward", lambda: forward(x, *four), *[x] * reads)
        run("backward", lambda: backward(x, y, *four), *[x] * (reads + 1))

    return call


def _target(x):
    return torch.empty(x.shape[0], *x.shape[2:], dtype=torch.int64)


def _squeeze_excite(run, make, *shape):
    x, C, R = make(*shape), shape[1], max(1, shape[1] // 4)
    weights = [x.new_empty(size) for size in ((R, C), (R,), (C, R), (C,))]
    y = run("forward", lambda: squeeze_excite.forward(x, *weights), x, x)
    rest = x, weights[0], weights[2], *y[1:]
    run("backward", lambda: squeeze_excite.backward(x, *rest), x, x, x)


def _products(run, tensors, multiply_adds, module, **options):
    """The passes of a layer with weights: `tensors` are dy, x and weight."""
    dy, x, weight = tensors
    options |= dict(precision="tf32")
    calls = {"forward": lambda: module.forward(x, weight, **options)}
    for name, needs in (("dx", (True, False, False)), ("dweight", (False, True, False))):
        calls[name] = partial(module.backward, dy, x, weight, needs=needs, **options)
    for name, call in calls.items():
        run(name, call, *tensors, multiply_adds=multiply_adds)


def _linear(run, make, M, N, K):
    _products(run, (make(M, N), make(M, K), make(N, K)), M * N * K, linear)


def _convolution(taps, stride=1, of=None):
    """With `of` channels a group, and as many filters as channels; without, one group."""

    def call(run, make, N, C, K, H, W):
        C, K, pad = (up(C, of), up(C, of), taps // 2) if of else (C, K, taps // 2)
        P, Q = ((n + 2 * pad - taps) // stride + 1 for n in (H, W))
        tensors = make(N, K, P, Q), make(N, C, H, W), make(K, of or C, taps, taps)
        options = dict(stride=stride, padding=pad, groups=C // of if of else 1)
        _products(run, tensors, N * K * P * Q * (of or C) * taps**2, conv2d, **options)

    return call


def _conv_transpose(run, make, N, C, K, H, W):
    tensors = make(N, K, 2 * H, 2 * W), make(N, C, H, W), make(C, K, 2, 2)
    _products(run, tensors, N * C * K * H * W * 4, conv_transpose2d, stride=2)


def _attention(run, make, B, H, T, D):
    q = make(B, H, T, D)
    o, lse = run("forward", lambda: attention.forward(q, q, q), *[q] * 4)[:2]
    run("backward", lambda: attention.backward(q, q, q, q, o, lse), *[q] * 8)


ROWS, IMAGES = dict(M=30_000, N=60_000), dict(N=128, C=512, H=128, W=128)
CONVOLUTION = dict(N=64, C=512, K=512, H=100, W=100)
POOL = dict(stride=2, padding=1)
#: {name: (function, the most that each extent may be)}.
OPERATIONS = {
    "softmax": (_two(lambda x, *_: softmax.forward(x), lambda x, *_: softmax.backward(x, x)), ROWS),
    "gelu": (_two(lambda x, *_: activation.gelu.forward(x),
                  lambda x, *_: activation.gelu.backward(x, x)), ROWS),
    "layer_norm": (_two(lambda x, w, b, *_: layer_norm.forward(x, w, b),
                        lambda x, y, w, *_: layer_norm.backward(x, x, w, *y[1:])), ROWS),
    "softmax_dropout": (_two(lambda x, *_: softmax_dropout.forward(x, 0.5, 1, 0), lambda x, y, *_:
                             softmax_dropout.backward(x, x, y[1], 0.5, 1, 0)), ROWS),
    "bn_relu_softmax": (_two(bn_relu_softmax.forward, lambda x, y, *four: bn_relu_softmax.backward(
        x, y, x, *four)), ROWS),
    "batch_norm": (_two(batch_norm.forward, lambda x, y, w, *_: batch_norm.backward(
        x, x, w, *y[1:3])), IMAGES),
    "max_pool2d": (_two(lambda x, *_: max_pool2d.forward(x, 3, **POOL), lambda x, y, *_:
                        max_pool2d.backward(*y, x.shape, 3, **POOL)), IMAGES),
    "global_avg_pool": (_two(lambda x, *_: global_avg_pool.forward(x), lambda x, y, *_:
                             global_avg_pool.backward(y, x.shape[2:]), reads=1), IMAGES),
    "upsample": (_two(lambda x, *_: upsample.forward(x, (2 * x.shape[2], 2 * x.shape[3])),
                      lambda x, y, *_: upsample.backward(y, tuple(x.shape)), reads=5), IMAGES),
    "squeeze_excite": (_squeeze_excite, IMAGES),
    "linear": (_linear, dict(M=30_000, N=6000, K=6000)),
    "conv2d 1x1": (_convolution(1), CONVOLUTION),
    "conv2d 3x3": (_convolution(3), CONVOLUTION),
    "conv2d 3x3 stride 2": (_convolution(3, stride=2), CONVOLUTION),
    "conv2d groups of 4": (_convolution(3, of=4), CONVOLUTION),
    "conv2d depthwise": (_convolution(3, of=1), CONVOLUTION),
    "conv_transpose2d": (_conv_transpose, CONVOLUTION),
    "attention": (_attention, dict(B=16, H=16, T=4096, D=256)),
} | {
    name: (_two(lambda x, *_, m=m: m.forward(x, _target(x)),
                lambda x, y, *_, m=m: m.backward(y[0], x, _target(x), *y[1:]), reads=1), extents)
    for name, m, extents in (("cross_entropy", cross_entropy, ROWS), ("dice", dice, IMAGES),
                             ("pixel_cross_entropy", cross_entropy, IMAGES))
}  # fmt: skip
