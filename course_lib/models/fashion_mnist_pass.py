"""A `FashionMNISTCNN` forward and backward by kernels that call each other, without its modules.

What modules and autograd cost the host is several times what kernels this small cost the GPU. And
between the first convolution and the first linear layer, images lie channels-last, as tensor cores
want to read them; each ReLU is part of the pooling before it.
"""

import contextlib

from course_lib.kernels import activation, conv2d, linear, max_pool2d
from course_lib.kernels.blocks import memory_format
from course_lib.runtime.host import arrays

NAMES = ("conv1", "conv2", "fc1", "fc2")
TAPS = 3  # of a filter, down and across
POOLING = dict(kernel_size=2)
OF_INPUT, OF_WEIGHTS = (True, False, False), (False, True, True)  # which gradients are wanted
relu = activation.relu


def weights_of(model):
    """{layer: (weight, bias)} of a `FashionMNISTCNN`, unknown to autograd.

    The weights of its second convolution are laid out channels-last, in place.
    """
    weight = model.conv2.weight
    if not arrays.is_channels_last(weight):
        weight.data = memory_format.channels_last(weight.detach().contiguous())
    layers = {name: getattr(model, name) for name in NAMES}
    return {name: (layer.weight.detach(), layer.bias.detach()) for name, layer in layers.items()}


def forward(layers, x, *, precision="float32", of_linear=None, out=None):
    """(logits, what `backward` needs) for images x, float32 (N, 1, H, W).

    layers     as `weights_of` returns them
    precision  "float32" or "tf32"; of_linear: that of the linear layers, if it is another
    out        receives the logits
    """
    # What the backward pass does not need is given up at once: of a pooling's input, the shape.
    exact, of_linear = dict(precision=precision), dict(precision=of_linear or precision)
    conv1, (w2, b2), fc1, fc2 = layers.values()
    N, _, H, W = x.shape
    shape = N, len(conv1[1]), H - TAPS + 1, W - TAPS + 1
    a = conv2d.forward(x, *conv1, out=arrays.empty(shape, like=x, channels_last=True), **exact)
    b, a_at = max_pool2d.forward(a, **POOLING, index_dtype="uint8", relu=True)
    a = a.shape
    c = conv2d.forward(b, w2, b2, **exact)
    d, c_at = max_pool2d.forward(c, **POOLING, index_dtype="uint8", relu=True)
    c, d = c.shape, memory_format.contiguous(d)
    e = linear.forward(d.view(N, fc1[0].shape[1]), *fc1, activation="relu", **of_linear)
    return linear.forward(e, *fc2, out=out, **of_linear), (x, a, a_at, b, c, c_at, d, e)


def backward(layers, dlogits, kept, *, precision="float32", beside=contextlib.nullcontext):
    """{layer: (gradient of its weight, of its bias)}, from what `forward` returned.

    beside  where what no other layer waits for is launched (a `train.capturing.Branch`)
    """
    # The name is used again and again: what nobody holds makes room for what comes.
    exact = dict(precision=precision)
    x, a_shape, a_at, b, c_shape, c_at, d, e = kept
    w1, given_w2, w3, w4 = (weight for weight, _ in layers.values())
    w2 = memory_format.channels_last(given_w2)
    flat = d.view(len(x), w3.shape[1])
    dy = dlogits
    with beside(dy):
        _, *fc2 = linear.backward(dy, e, w4, needs=OF_WEIGHTS, **exact)
    dy, *_ = linear.backward(dy, e, w4, needs=OF_INPUT, **exact)
    dy = relu.backward(dy, e, out=dy)
    with beside(dy):
        _, *fc1 = linear.backward(dy, flat, w3, needs=OF_WEIGHTS, **exact)
    dy, *_ = linear.backward(dy, flat, w3, needs=OF_INPUT, **exact)
    dy = memory_format.channels_last(dy.view(d.shape))
    dy = max_pool2d.backward(dy, c_at, c_shape, **POOLING)
    with beside(dy):
        _, dw2, db2 = conv2d.backward(dy, b, w2, needs=OF_WEIGHTS, **exact)
        conv2 = dw2 if given_w2 is w2 else memory_format.contiguous(dw2), db2
    dy, *_ = conv2d.backward(dy, b, w2, needs=OF_INPUT, **exact)
    dy = max_pool2d.backward(dy, a_at, a_shape, **POOLING)
    _, *conv1 = conv2d.backward(dy, x, w1, needs=OF_WEIGHTS, **exact)
    return dict(zip(NAMES, (conv1, conv2, fc1, fc2), strict=True))
