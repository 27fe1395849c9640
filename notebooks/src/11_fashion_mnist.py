# %% [markdown]
# # 11 · A network of nothing but your kernels
#
# **After this lesson** you can put your own kernels of this course together into a network that learns to tell clothes
# apart, write its whole way back and prove it right, see by whose kernels each layer runs, count its parameters and its work,
# say what a captured graph saves and why, read curves of learning, and see from a table what a network mixes up.
#
# **You need** lessons [8](08_convolution.ipynb), [9](09_convolution_backward.ipynb) and
# [10](10_the_other_layers.ipynb) (the layers), and [lesson 5](05_fusing_softmax.ipynb) (cross-entropy). What you have solved
# there runs here. Of [lesson 4](04_softmax_at_the_limit.ipynb) it helps to remember launches and graphs.
#
# **Time:** 130 minutes; there are good places to pause after sections 2 and 3. All cells together run in two minutes
# without a GPU. Where something was measured on a GPU for the course, you see the record; where it was not, the lesson says
# so. The words are collected in the [glossary](glossary.md).

# %%
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch

from course_lib import SIMULATED, bench, cuda, data, models, plot, results_table, train
from course_lib.runtime.host.launch import recorded as launches_of
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach import TODO, Scoreboard, check, hint, progress, solution, use

# %%
ZERO, ONE, SCALE = np.float32(0), np.float32(1), np.float32(1 / 127.5)
records = bench.load_records()


@cache
def measured(name, shape=None):
    """The record called `name`; None, and a line that says so, if there is none."""
    wanted = {"name": name} | ({} if shape is None else {"shape": shape})
    if found := bench.find(records, **wanted):
        source = {"device": records["device"]["name"], "date": results_table.when(found[0])}
        return found[0] | {"source": source}
    return print(f"{name} has not been measured on a GPU yet.")


print("records are of an", records["device"]["name"])

# %% [markdown]
# ## 1 · Clothes
#
# **Fashion-MNIST** (Xiao, Rasul and Vollgraf, 2017) is a set of 70,000 small grey pictures of clothes, in ten classes: 60,000 to learn
# from and 10,000 to be tested with. It is small enough to train in seconds, and not so easy that anything would do.
#
# The pictures themselves are not part of this course. `python -m course_lib train fashion-mnist` downloads them and trains on them. In this
# notebook we use a set that the course *draws*: 1,200 simple pictures of the same ten classes, the same on every machine. They are easier. What you
# see works the same way with the real ones, and the records below are of those.

# %%
train_images, train_labels = data.fashion_mnist()
test_images, test_labels = data.fashion_mnist(train=False)
names = data.FASHION_CLASSES
first = [int((train_labels == k).nonzero()[0]) for k in range(10)]
plot.images([train_images[k] for k in first], names, columns=5, vmin=0, vmax=255, pixels=False,
            title="One of each class, 28 × 28 bytes")

# %% [markdown]
# ### The network
#
# | layer | what it makes | lesson |
# |---|---|---|
# | convolution 3 × 3 | 64 channels of 26 × 26 | 8 |
# | max pooling 2 × 2, ReLU | 64 channels of 13 × 13 | 10 |
# | convolution 3 × 3 | 128 channels of 11 × 11 | 8 |
# | max pooling 2 × 2, ReLU | 128 channels of 5 × 5, flattened: 3,200 numbers | 10 |
# | linear, ReLU | 256 numbers | 10 |
# | linear | 10 logits, one for each class | 10 |
#
# (There is no padding, so each convolution makes the picture smaller by two. 11 is odd: pooling leaves the last row and column out. ReLU comes *after* pooling: the
# largest of four and then the larger of that and 0 is the same as the other way round, with a quarter of the work.)
#
# **Predict,** with a pencil: which layer has the most parameters (weights and biases)? And which has the most work?

# %%
model = models.FashionMNISTCNN()
work = {"conv1": 26 * 26, "conv2": 11 * 11, "fc1": 1, "fc2": 1}  # how often each weight is used
for name, places in work.items():
    layer = getattr(model, name)
    weights = layer.weight.numel()
    print(f"{name}: {weights + layer.bias.numel():7,} parameters, "
          f"{2 * weights * places / 1e6:5.2f} · 10⁶ FLOPs for a picture")
print(f"in all {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# Nine tenths of the parameters are in the first linear layer, and nine tenths of the FLOPs in the second convolution. That is typical. A convolution uses each of its weights
# at every place of the picture, a linear layer uses each once.
#
# ## 2 · Training by hand
#
# A training step has five parts: a batch, the forward pass, the loss, the backward pass, and the update of the weights. We go through all of them with kernels, and
# you write some. To be quick in the simulator, the network is a narrow one for now: 2 and 4 channels, 16 hidden numbers, and batches of 8.
#
# ### Whose kernels?
#
# A solution that passes its check is kept with your progress, also for other lessons. The **scoreboard** takes yours, and where you have none it takes the course's and says so. It starts every kernel of this section, and counts the
# launches. (If you would rather see your own: solve that exercise in its lesson, and run the next cell again.)

# %%
board = Scoreboard()
for name in ("conv2d_direct", "conv2d_dx", "conv2d_dweight", "conv2d_dbias",
             "cross_entropy", "cross_entropy_backward"):
    board.use(name)

# %% [markdown]
# ### The batch
#
# The pictures lie on the GPU as bytes, all of them, 47 MB for the real set. A batch is some of them in a random *order*, with pixels from −1 to 1 instead of
# 0 to 255: $x = \text{pixel} / 127.5 - 1$. To do this on the GPU means that nothing has to come from the host.
#
# ### Exercise: pick a batch
#
# `images` is (n, pixels), bytes. `order` holds the numbers of the pictures in the order of this epoch, and this batch begins at place `first` of it. A block for each
# picture of the batch.

# %% exercise="pick_batch"
@cuda.jit
def pick_batch(images, labels, order, first, x, y):
    row = TODO  # which picture is this block's?
    for i in range(cuda.threadIdx.x, images.shape[1], cuda.blockDim.x):
        x[cuda.blockIdx.x, i] = TODO
    if cuda.threadIdx.x == 0:
        y[cuda.blockIdx.x] = TODO


check("pick_batch", pick_batch)

# %%
hint("pick_batch")

# %%
board.use("pick_batch", pick_batch)
BATCH = 8
pictures = cuda.to_device(train_images.numpy().reshape(-1, 784))
classes = cuda.to_device(train_labels.numpy())
order = cuda.to_device(np.random.default_rng(0).permutation(len(train_images)))


def empty(*shape, dtype=np.float32):
    return cuda.to_device(np.zeros(shape, dtype=dtype))

# %%
def batch_of(step):
    """The pictures and labels of one step: fresh ones each time."""
    x, y = empty(BATCH, 784), empty(BATCH, dtype=np.int64)
    board.launch("batch", "pick_batch", 64 * BATCH, pictures, classes, order, step * BATCH, x, y, block=64)
    return x.reshape(BATCH, 1, 28, 28), y


x, y = batch_of(0)
plot.images(list(x.copy_to_host()[:, 0]), [names[k] for k in y.copy_to_host()], columns=4,
            vmin=-1, vmax=1, pixels=False, title="The first batch")

# %% [markdown]
# ### Forward
#
# The convolutions are your `conv2d_direct` of lesson 8. Behind each of them come pooling and ReLU, and those can be *one* kernel.
#
# ### Exercise: max pooling and ReLU in one
#
# `x` is (planes, H, W), windows are 2 × 2. `y` has half as many rows and columns; of an odd number, the last is left out.

# %% exercise="pool_relu"
@cuda.jit
def pool_relu(x, y):
    OH, OW = y.shape[1:]
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        TODO  # which plane, which window? The largest of its four numbers and of 0


check("pool_relu", pool_relu)

# %%
hint("pool_relu")

# %% [markdown]
# ### Exercise: a dense layer with its ReLU
#
# For a small batch, a matrix product with large tiles would leave most of the chip idle. So here a *warp* makes one result: its lanes share the products. `warp_sum(value)` gives all
# 32 lanes the sum of their values (lesson 2), and all of them must call it. `x` is (M, I), `weight` (O, I), `y` (M, O); there are at least as many warps as results.

# %% exercise="linear_relu"
@cuda.jit
def linear_relu(x, weight, bias, y):
    warp, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    n_out, total = y.shape[1], ZERO
    if warp < y.size:
        TODO  # 1. this lane's share of the products of row warp // n_out and row warp % n_out
        TODO  # 2. the sum of all lanes, the bias, ReLU; one lane writes


check("linear_relu", linear_relu)

# %%
hint("linear_relu")

# %% [markdown]
# The forward pass of the narrow network, for the batch that your kernel has picked. Beside it a twin of PyTorch's layers, with the same weights.
#
# The last layer is dense too, but has no ReLU. **Predict:** which kernel that you have already could do it?
#
# <details><summary>Answer</summary>
#
# `conv2d_direct`. A row of 16 numbers is a picture of a single pixel with 16 channels, and each output is a filter of a single tap for each channel: the same sum.
# </details>

# %%
board.use("pool_relu", pool_relu)
board.use("linear_relu", linear_relu)
torch.manual_seed(3)
twin = models.FashionMNISTCNN(widths=(2, 4, 16), layers=torch.nn)
weights = {name: cuda.to_device(p.detach().numpy().copy()) for name, p in twin.named_parameters()}


def conv(layer, x, weight, bias):
    (N, _, H, W), (K, _, R, S) = x.shape, weight.shape
    y = empty(N, K, H - R + 1, W - S + 1)
    board.launch(layer, "conv2d_direct", y.size, x, weight, bias, y, 1, 0)
    return y

# %%
def pool(layer, x):
    N, C, H, W = x.shape
    y = empty(N * C, H // 2, W // 2)
    board.launch(layer, "pool_relu", y.size, x.reshape(N * C, H, W), y)
    return y.reshape(N, C, H // 2, W // 2)


def pixels(rows):
    """The rows of a dense layer as what they are: pictures of one pixel."""
    return rows.reshape(*rows.shape, 1, 1)

# %%
def forward(x):
    """The logits, and what the way back needs."""
    w1, b1, w2, b2, w3, b3, w4, b4 = weights.values()
    a = conv("conv1", x, w1, b1)
    c = pool("pool1", a)
    d = conv("conv2", c, w2, b2)
    e = pool("pool2", d)
    g = empty(len(x), 16)
    board.launch("fc1", "linear_relu", 32 * g.size, e.reshape(len(x), 100), w3, b3, g)
    logits = conv("fc2", pixels(g), pixels(w4), b4).reshape(len(x), 10)
    return logits, (x, a, c, d, e, g)

# %%
logits, kept = forward(x)
with torch.no_grad():
    theirs = twin(torch.tensor(x.copy_to_host())).numpy()
print(f"largest difference from PyTorch {abs(logits.copy_to_host() - theirs).max():.0e}")

# %% [markdown]
# ### Loss
#
# The loss is the cross-entropy of lesson 5, the mean over the batch: your kernel makes a loss for each picture, and on the way back each gets its share of 1, an eighth.

# %%
def loss_of(logits, labels):
    """The batch's mean loss, and the gradient of the logits."""
    loss, m, s, dlogits = empty(BATCH), empty(BATCH), empty(BATCH), empty(BATCH, 10)
    board.launch("loss", "cross_entropy", 32 * BATCH, logits, labels, loss, m, s)
    share = cuda.to_device(np.full(BATCH, 1 / BATCH, dtype=np.float32))
    board.launch("loss", "cross_entropy_backward", 32 * BATCH, share, logits, labels, m, s, dlogits)
    return float(loss.copy_to_host().mean()), dlogits


loss, dlogits = loss_of(logits, y)
print(f"loss {loss:.3f}; a guess has {math.log(10):.3f}")

# %% [markdown]
# (Ten classes, and a network that knows nothing: it gives each about a probability of 1/10, and cross-entropy says $\ln 10$ of that.)
#
# ### Backward
#
# Layer by layer, in reverse order. Each layer gets the gradient of its output, and gives back those of its input, its weights and its bias. For the convolutions you have all three kernels (lesson 9). What is missing is the way back through
# pooling and ReLU.
#
# ### Exercise: back through pooling and ReLU
#
# In lesson 10 the forward pass wrote down where each maximum was. Here nobody has; but `x` and `y` are still there, and tell it. `x` is (planes, H, W), windows are `k` × `k`, and `y` is what pooling and then ReLU made of `x`. The gradient of a window goes to the *first* of its
# elements, row by row, that equals `y`, and to nobody where `y` is 0. Rows and columns that no window has read get 0. (With `k` = 1, this is ReLU alone.)

# %% exercise="pool_relu_backward"
@cuda.jit
def pool_relu_backward(dy, x, y, k, dx):
    H, W = x.shape[1:]
    for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
        plane, h, w = i // (H * W), i // W % H, i % W
        gradient = ZERO
        TODO  # which window? Is there one, has it let anything through, and is this its first maximum?
        dx[plane, h, w] = gradient


check("pool_relu_backward", pool_relu_backward)

# %%
hint("pool_relu_backward")

# %% [markdown]
# Now the layers' ways back, each a function that launches your kernels:

# %%
board.use("pool_relu_backward", pool_relu_backward)
layer_of = {w.shape: name.removesuffix(".weight") for name, w in weights.items() if len(w.shape) > 1}
layer_of |= {(BATCH, 2, 13, 13): "pool1", (BATCH, 4, 5, 5): "pool2"}


def back_through(layer, kernel, dy, x, y, k):
    dx = empty(*x.shape)
    board.launch(f"{layer}, back", kernel, x.size, dy, x, y, k, dx)
    return dx


def bias_back(layer, dy):
    dbias = empty(dy.shape[1])
    board.launch(f"{layer}, back", "conv2d_dbias", 32 * len(dbias), dy, dbias, block=32)
    return dbias

# %%
def conv_back(dy, x, weight, needs_dx=True):
    layer, dx, dweight = layer_of[weight.shape], None, empty(*weight.shape)
    if needs_dx:
        dx = empty(*x.shape)
        board.launch(f"{layer}, back", "conv2d_dx", dx.size, dy, weight, dx, 1, 0)
    board.launch(f"{layer}, back", "conv2d_dweight", 32 * dweight.size, dy, x, dweight, 1, 0)
    return dx, dweight, bias_back(layer, dy)


def pool_relu_back(dy, x, y):
    planes = [each.reshape(-1, *each.shape[2:]) for each in (dy, x, y)]
    return back_through(layer_of[y.shape], "pool_relu_backward", *planes, 2).reshape(*x.shape)

# %% [markdown]
# A dense layer needs no kernels of its own for the way back. It is a convolution of pictures of one pixel, so `conv2d_dx` gives the gradient of its input. The gradient of its weights looks alike. One is a sum over the outputs, the other over the pictures:
#
# $$ \text{dx}_{ni} = \sum_o \text{dy}_{no} \, \text{weight}_{oi} \qquad\qquad \text{dweight}_{oi} = \sum_n x_{ni} \, \text{dy}_{no} $$
#
# So the same kernel makes both, if the pictures stand where it expects channels. Nothing is copied for that: the numbers already lie in that order, and only the shapes say something else.

# %%
def linear_back(dy, x, weight):
    (N, K), C = dy.shape, x.shape[1]
    layer, dx, dweight = layer_of[weight.shape], empty(N, C, 1, 1), empty(1, K, 1, C)
    for given, factor, found in ((pixels(dy), pixels(weight), dx), (x.reshape(1, N, 1, C), pixels(dy), dweight)):
        board.launch(f"{layer}, back", "conv2d_dx", found.size, given, factor, found, 1, 0)
    return dx.reshape(N, C), dweight.reshape(K, C), bias_back(layer, pixels(dy))


def relu_back(dy, y):
    one = [each.reshape(1, *each.shape) for each in (dy, y, y)]
    return back_through("fc1", "pool_relu_backward", *one, 1).reshape(*y.shape)


back = SimpleNamespace(conv=conv_back, linear=linear_back, relu=relu_back, pool_relu=pool_relu_back)

# %% [markdown]
# ### Exercise: the whole network backwards
#
# Put them together. `kept` is what the forward pass has kept, `weights` are those of the four layers (`conv1`, `conv2`, `fc1`, `fc2`). You have
#
# | call | returns |
# |---|---|
# | `back.linear(dy, x, weight)` | dx, dweight, dbias |
# | `back.conv(dy, x, weight, needs_dx=True)` | dx (None if it is not needed), dweight, dbias |
# | `back.pool_relu(dy, x, y)` | dx, in the shape of x |
# | `back.relu(dy, y)` | dx |
#
# Return eight gradients: weight and bias of `conv1`, `conv2`, `fc1` and `fc2`, in this order. **Predict** first: which gradient does nobody need?
#
# (The check gives you a `back` made with NumPy, and small networks. In this notebook you get the one above, with your kernels.)

# %% exercise="backward_chain"
def backward_chain(dlogits, kept, weights, back):
    x, a, c, d, e, g = kept
    conv1, conv2, fc1, fc2 = weights
    dg, *d_fc2 = back.linear(dlogits, g, fc2)
    TODO  # ReLU, fc1; pooling and ReLU, conv2; pooling and ReLU, conv1
    return TODO


check("backward_chain", backward_chain)

# %%
hint("backward_chain")

# %%
chain = use("backward_chain", backward_chain)


def gradients(dlogits, kept):
    """A dictionary from the name of each weight and bias to its gradient."""
    return dict(zip(weights, chain(dlogits, kept, list(weights.values())[::2], back)))


found = gradients(dlogits, kept)

# %%
expected = torch.nn.functional.cross_entropy(twin(torch.tensor(x.copy_to_host())),
                                             torch.tensor(y.copy_to_host()))
expected.backward()
print(f"loss {loss:.5f}, PyTorch's {expected.item():.5f}")
for name, p in twin.named_parameters():
    error = np.linalg.norm(found[name].copy_to_host() - p.grad.numpy()) / np.linalg.norm(p.grad.numpy())
    print(f"{name:12} relative error of the gradient {error:.0e}")

# %% [markdown]
# The gradient of the *pictures* is not needed: nobody wants to change them. So `conv1` is spared a third of its work, and the captured step further below does the same.
#
# ### The update
#
# The recipe that we train by is SGD with momentum (lesson 10), in a form by Nesterov, and with **weight decay**: each weight is also pulled a little towards 0, so that none of them grows without need. With the learning rate $\eta$,
# momentum $\beta$ and decay $\lambda$:
#
# $$ g' = g + \lambda \, p \qquad\qquad v \leftarrow \beta \, v + g' \qquad\qquad p \leftarrow p - \eta \, (g' + \beta \, v) $$
#
# Plain momentum would step by $v$. Nesterov's form looks ahead: it steps as if the momentum of the *next* step had already been added.
#
# ### Exercise: the step of the recipe

# %% exercise="sgd_nesterov"
@cuda.jit
def sgd_nesterov(p, g, v, rate, momentum, decay, new_p, new_v):
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        gradient = TODO
        velocity = TODO
        new_v[i] = velocity
        new_p[i] = TODO


check("sgd_nesterov", sgd_nesterov)

# %%
hint("sgd_nesterov")

# %%
board.use("sgd_nesterov", sgd_nesterov)
velocity = {name: empty(p.size) for name, p in weights.items()}


def update(found, rate=np.float32(0.05)):
    for name, p in weights.items():
        decay = np.float32(5e-4 if len(p.shape) > 1 else 0)
        new_p, new_v = empty(p.size), empty(p.size)
        flat = p.reshape(p.size), found[name].reshape(p.size), velocity[name]
        board.launch("update", "sgd_nesterov", p.size, *flat, rate, np.float32(0.9), decay, new_p, new_v)
        weights[name], velocity[name] = new_p.reshape(*p.shape), new_v

# %% [markdown]
# ### A step, and whose it was
#
# Batch, forward, loss, backward, update: one step of training. The board counts from here.

# %%
def train_step(step):
    x, y = batch_of(step)
    logits, kept = forward(x)
    loss, dlogits = loss_of(logits, y)
    update(gradients(dlogits, kept))
    return loss


board.clear()
losses = {"these kernels": [train_step(0)], "PyTorch": []}
board.show()

# %% [markdown]
# Each kernel that ran stands there, and there was no other: no library has computed a number of this step. (NumPy fills new arrays with zeros, and takes the mean of eight losses, for the picture only.) The kernels that are not yours yet are the course's solutions of the
# same exercises. In the solved notebook these are all from earlier lessons, for it takes nothing from anybody's progress.
#
# ### Fresh batches
#
# Forty steps, and each picture is seen once at most: the network cannot learn them by heart. PyTorch's twin gets the same batches. **Predict** what its curve looks like.

# %%
for step in range(1, 20):
    losses["these kernels"].append(train_step(step))
print(f"after 20 steps: a loss of {np.mean(losses['these kernels'][-8:]):.2f} (mean of 8)")

# %%
for step in range(20, 40):
    losses["these kernels"].append(train_step(step))
print(f"after 40 steps: a loss of {np.mean(losses['these kernels'][-8:]):.2f} (mean of 8)")

# %%
optimizer = torch.optim.SGD(
    [{"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 5e-4},
     {"params": [p for p in twin.parameters() if p.dim() == 1]}], lr=0.05, momentum=0.9, nesterov=True
)
for chosen in torch.tensor(order.copy_to_host()[:40 * BATCH]).split(BATCH):
    batch = train_images[chosen, None].float() / 127.5 - 1
    loss = torch.nn.functional.cross_entropy(twin(batch), train_labels[chosen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses["PyTorch"].append(loss.item())

# %%
one, other = losses.values()
print(f"largest difference from PyTorch in {len(one)} steps: {max(abs(a - b) for a, b in zip(one, other)):.0e}")
plot.curves(range(len(one)), losses, xlabel="step", ylabel="cross-entropy of a fresh batch",
            title="It learns, and the two curves are one")

# %% [markdown]
# From $\ln 10$ downwards, with ups and downs: eight pictures are few, and some batches are harder than others. Both have the same ups and downs, for they compute the same numbers; only rounding sets them apart.
#
# ### What is mixed up?
#
# One number, the **accuracy**, says how many pictures of the test set the network knows. A table says more: for each true class, which answers it got. It is called a **confusion matrix**, and it is a histogram with two indices.
#
# ### Exercise: count the confusions

# %% exercise="confusion"
@cuda.jit
def confusion(logits, labels, counts):
    for i in range(cuda.grid(1), labels.size, cuda.gridsize(1)):
        best = 0
        TODO  # the place of the largest logit; of equal ones the first
        TODO  # one more in row labels[i], column best


check("confusion", confusion)

# %%
hint("confusion")

# %%
board.use("confusion", confusion)


def confusions(logits, labels):
    counts = empty(10, 10, dtype=np.int32)
    board.launch("test", "confusion", len(labels), logits, cuda.to_device(labels.numpy()), counts)
    return counts.copy_to_host()


unseen = cuda.to_device(test_images[:100, None].numpy() / np.float32(127.5) - ONE)
counts = confusions(forward(unseen)[0], test_labels[:100])
print(f"{np.trace(counts)} of {counts.sum()} clothes that it has never seen are known")
plot.confusion(counts, names, title="Forty steps: true classes and answers")

# %% [markdown]
# A good place for a break.

# %% [markdown]
# ## 3 · Through autograd
#
# Nobody writes a backward pass by hand for each network. In the course's library every operation is an operator of PyTorch with its gradient (lesson 4), and `course_lib.nn` has modules with
# the names of PyTorch's. So the whole of section 2 becomes:
#
# ```python
# model = models.FashionMNISTCNN()                      # layers of course_lib.nn
# loss = ops.cross_entropy(model(x), labels)
# loss.backward()
# optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True).step()
# ```
#
# `train.train_fashion_mnist` does that for five epochs. On a GPU it runs our kernels. Without one it runs PyTorch's operators on the CPU, and says so when it is started from the command line. That is what happens
# here, with the drawn clothes, and the *whole* network of 896,522 parameters:

# %%
model, history = train.train_fashion_mnist(
    train_images, train_labels, test_images, test_labels, epochs=3, batch_size=32,
    use_cuda_kernels=not SIMULATED,
)
print("trained by", "PyTorch's CPU operators" if SIMULATED else "our kernels, on a GPU")
plot.learning_curves(history, title="Drawn clothes, three epochs")

# %%
counts = confusions(cuda.to_device(train.predict(model, test_images).cpu().numpy()), test_labels)
print(f"{np.trace(counts) / counts.sum():.1%} of {counts.sum()} drawn clothes are known")
plot.confusion(counts, names, title="Three epochs of the whole network: true classes and answers")

# %% [markdown]
# With the real pictures, after five epochs, on the GPU of the records. In brackets are three runs, each with another seed. **Predict** which two classes are mixed up most.

# %%
runs = measured("fashion_mnist.runs")
if runs:
    for label, share in runs["accuracy"].items():
        each = ", ".join(f"{r['history'][-1]['validation_accuracy']:.2%}" for r in runs["rows"]
                         if r["label"] == label)
        print(f"{label:15} {share:.2%} of the test pictures ({each})")

# %%
def show_confusion(runs):
    if runs is None:
        return None
    row = runs["rows"][0]
    return plot.confusion(row["confusion"], names, title=f"Fashion-MNIST, {row['label']}, {row['steps']:,} steps",
                          **runs["source"])


show_confusion(runs)

# %% [markdown]
# The three ways differ by less than the three runs of any of them: what is left between them is chance. And shirts and T-shirts are mixed up most, both ways.
#
# A good place for a break.

# %% [markdown]
# ## 4 · The pure path
#
# How long does a step take? Count its launches. The step of `train.FashionMNISTPass` is the one of section 2: one kernel is launched after the other, there is no autograd and no arithmetic of PyTorch's at all. Here
# its launches are noted while it runs in the simulator, with a single picture and a network of one channel. (Some more fill the optimiser's table of
# addresses, see lesson 10. We leave them out.)

# %%
torch.manual_seed(0)
place = "cpu" if SIMULATED else "cuda"
narrow = models.FashionMNISTCNN(widths=(1, 1, 2)).to(place)
trainer = train.FashionMNISTPass(narrow, train_images[:8], train_labels[:8], (test_images[:2], test_labels[:2]),
                                 epochs=1, batch_size=1, learning_rate=0.05, seed=0)
with launches_of() as launches:
    trainer._step()
kernels = [kernel.__name__ for kernel, *_ in launches]
kernels = [name for name in kernels if name not in ("fill_kernel", "chunks_kernel")]
print(f"{len(kernels)} launches, the first of them:", ", ".join(kernels[:5]))

# %% [markdown]
# On the GPU most of these kernels need a few microseconds for a small batch. But PyTorch's eager way takes the *host* some five microseconds or more to get each operation started, with autograd twice that. So the chip waits for Python.
#
# Lesson 4 had the cure: a **CUDA graph**. The launches are noted once, with all their arguments, and then the whole list is started by a single call. It has a price: *nothing may change* from step to step, neither shapes
# nor addresses nor numbers among the arguments. But three things do change in training:
#
# 1. **the batch.** The graph's first kernel picks it, as yours did. It reads from memory which step it is, and counts on;
# 2. **the order.** Shuffling 60,000 numbers would be a kernel of its own. Instead, a formula says which picture comes at place $i$: a permutation made of random bits that nobody stores (a *Feistel network*, from cryptography);
# 3. **the learning rate.** It rises in the first tenth of the steps and then falls to 0 along a cosine. The update reads it from memory, where another small kernel has put it.
#
# So the host starts one graph for each step and looks at nothing until the epoch ends. (The update finds the gradients by a table of addresses. Where they lie turns out while the graph is captured; the table is filled once, right after that, and
# the graph's last kernels read it in each step.)
#
# A graph can do one more thing that a list of launches cannot: say what does *not* have to wait. The gradients of the weights are needed by nobody until the update. So the graph has a second **branch** for them, beside the gradients of the
# inputs, on which the layers before are waiting. Kernels too small to fill the chip then run side by side.

# %%
steps = np.arange(1000)
rate = np.where(steps < 100, 0.05 * (steps + 1) / 100, 0.05 * (1 + np.cos(np.pi * (steps - 100) / 900)) / 2)
plot.curves(steps, {"learning rate": rate}, xlabel="step", ylabel="learning rate",
            title="The learning rate of a run of 1,000 steps")

# %% [markdown]
# Without a GPU there is no graph to capture, and `FashionMNISTPass` runs its kernels one after another in the simulator. Does it learn as well as the way through autograd? The record has three runs of each on the real pictures, with the same first weights
# for each seed. **Predict** whether the curves lie on top of each other.

# %%
def show_losses(runs):
    if runs is None:
        return None
    curves = [(r["label"], np.arange(len(r["losses"])) * r["steps_to_a_point"], r["losses"])
              for r in runs["rows"]]
    return plot.losses(curves, title="Fashion-MNIST: three ways to train, three runs of each, learn alike", **runs["source"])


show_losses(runs)

# %% [markdown]
# All of them learn alike. Our modules and PyTorch get the same batches. So their curves begin as one, and what drives them apart later is rounding. The captured step takes the pictures in the order of its own formula,
# and so has other ups and downs.
#
# ## 5 · How fast is it?
#
# **Throughput** is the number of pictures per second. Four contestants: our captured graph, our modules through autograd, PyTorch eager, and PyTorch captured in a graph. PyTorch is given its best: it may try all algorithms of cuDNN (NVIDIA's library
# of convolutions), has a fused optimiser, and of both memory formats the faster counts.
#
# **Predict:** for a batch of 1, which matters more, the kernels or the launches? And for 1,024?

# %%
WHO = ("ours, captured", "ours, modules", "PyTorch eager", "PyTorch captured")


def best_of(record, who):
    """Pictures per second, in the memory format that suits best."""
    return max(row["images_per_second"] for row in record["rows"] if row["label"].startswith(who))

# %%
def ratios(name):
    """{who: pictures per second, divided by those of PyTorch captured}, for each recorded batch."""
    speeds = {who: np.array([best_of(r, who) for r in bench.find(records, name=name)]) for who in WHO}
    captured = speeds.pop("PyTorch captured")
    return {who: list(speed / captured) for who, speed in speeds.items()}


if found := bench.find(records, name="fashion_mnist.training"):
    panels = {f"{name}, {end[1:].upper() or 'float32'}": ratios(f"fashion_mnist.{name}{end}")
              for name in ("training", "inference") for end in ("", ".tf32")}
    source = {"device": records["device"]["name"], "date": results_table.when(found[0])}

# %%
plot.relative(panels, [record["shape"][0] for record in found], xlabel="batch (pictures)",
              ylabel="× PyTorch captured", title="Pictures per second, divided by those of PyTorch in a graph",
              **source) if found else print("fashion_mnist.training has not been measured on a GPU yet.")

# %% [markdown]
# And the numbers behind it, in float32:

# %%
for name in ("training", "inference"):
    for record in bench.find(records, name=f"fashion_mnist.{name}"):
        speeds = ", ".join(f"{who} {best_of(record, who):,.0f}" for who in WHO)
        print(f"{name}, batch {record['shape'][0]:5,}, pictures per second: {speeds}")

# %%
for record in bench.find(records, name="fashion_mnist.training"):
    (ms,) = (row["microseconds"] / 1e3 for row in record["rows"] if row["label"] == "ours, modules")
    print(f"a step of our modules with {record['shape'][0]:5,} pictures: {ms:.1f} ms")

# %% [markdown]
# (**Inference** is the forward pass alone, of a trained network. `train.GraphInference` captures one graph for each batch size.)
#
# **Explaining the gap.** Where the captured graphs, ours and the line at 1, are above the others, the distance is launches, and Python. Our modules, trained through autograd, are the slowest everywhere but with 1,024 pictures in float32: each of their operators is a Python function, and
# PyTorch's are C++. In float32 a step takes them some three milliseconds, with one picture no less than with 1,024: it is the host that needs them, and not the chip. What an operator has once launched, it repeats for tensors of the same shapes (`host.launch_cache`), so that little of its own Python is left; that of modules and of autograd is still there.
#
# Between the two captured graphs the kernels decide. For a batch of 1 both have a few dozen launches that each take about as long as a launch takes; but ours stand on two branches, and the next one gets ready while the last one ends. From a batch of 8 on, ours gain from what this network lets them know: the first convolution has a
# kernel for few channels, pooling and ReLU are one, and images lie channels-last, as the tensor cores read them. What is left is the second convolution and its two gradients. The memory that a step needs at its peak:

# %%
for batch_size in (32, 1024):
    record = measured("fashion_mnist.training", (batch_size, 1, 28, 28))
    if record:
        peaks = ", ".join(f"{r['label']} {r['peak_bytes'] / 1e6:.0f} MB" for r in record["rows"])
        print(f"batch {batch_size}: {peaks}")

# %% [markdown]
# ## What the profiler says
#
# Where does a step of ours go? Each part was replayed by itself. **Predict** the longest one, from the FLOPs of section 1.

# %%
def show_parts(record):
    if record is None:
        return None
    *parts, whole = record["rows"]
    total = sum(row["microseconds"] for row in parts)
    title = (f"Batch {record['shape'][0]}: parts of {total:.0f} µs together, "
             f"a whole step takes {whole['microseconds']:.0f} µs")
    return plot.times(parts, title=title, **record["source"])


show_parts(measured("fashion_mnist.parts", (32, 1, 28, 28)))

# %%
show_parts(measured("fashion_mnist.parts", (1024, 1, 28, 28)))

# %% [markdown]
# What does a whole step take, beside its parts together? It can be less: the graph's second branch runs beside the first, and the next kernel's blocks come to the chip while the last blocks of this one are still at work. It can also be more: a part that is replayed by itself finds its inputs in the L2 cache, where its
# own last replay left them. And some launches belong to no part: the images are transposed on their way to the first linear layer, and back.
# In these records a batch of 32 takes more than its parts. With 1,024 it comes out nearly even.
#
# ## Where the real libraries go further
#
# - **More than one step for each graph**: ten steps in one graph would save nine starts. But the host could stop only after every tenth.
# - **Convolution, pooling and ReLU in one kernel**: the convolution's results would never reach memory. For inference this is what NVIDIA's TensorRT does.
# - **Several GPUs**: each takes a part of the batch, and the gradients are added up between them while the backward pass is still going on.
# - **Mixed precision**: weights in float32, everything else in bfloat16, with tensor cores throughout.
#
# ## Three questions
#
# <details><summary>1. Somebody captures a training step in a graph, and puts the learning rate in as a plain number. What happens?</summary>
#
# The number is noted with the launch, and every replay has the same one: the rate never changes. The loss still falls, only worse than it should, and nothing complains. This is why it is read from memory.
# </details>
#
# <details><summary>2. The network is trained with a batch of 32 and reaches some accuracy. With a batch of 1,024 and the same number of epochs it does not. Why?</summary>
#
# There are 32 times fewer steps, each with the same learning rate. A larger batch has a better gradient, and so can take longer steps; but that has to be told to it, by a higher rate, and it has its limits.
# </details>
#
# <details><summary>3. Shirts are mixed up with T-shirts, pullovers and coats more than anything else. Would a network with twice as many channels help?</summary>
#
# A little. 28 × 28 grey pixels do not always show a difference, and people mix up the same ones. When the training accuracy goes on rising and the test accuracy does not, the network has begun to learn pictures by heart, and a larger one does that even sooner.
# </details>

# %%
progress()

# %% [markdown]
# ## What comes next
#
# You have come all the way: from `cuda.grid(1)` in lesson 0 to a network that learns, in which there is no kernel that you could not have written. Take any layer that you meet, and ask of it what this course has asked of every one: what must
# it read and write, what limits it, how is it checked, and how far is it from the limit?
