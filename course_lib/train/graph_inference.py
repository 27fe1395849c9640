"""What a trained network says of images, by our kernels alone and in one captured graph.

A small network takes the GPU less time than Python needs to call its layers. A captured graph is
started once for all of them.
"""

import torch

from course_lib.models.fashion_mnist_pass import forward, weights_of
from course_lib.runtime.host import device

from .capturing import capture

MOST_GRAPHS = 16


class GraphInference:
    """Logits of a `models.FashionMNISTCNN`: ``GraphInference(model)(x)``.

    model        on a GPU; or, to see it work without one, on the CPU under
                 ``COURSE_LIB_SIMULATOR=1``, where nothing is captured. Its weights are read where
                 they lay when this was made (`conv2.weight` channels-last, which this makes it):
                 training in place is seen, new tensors are not
    precision    "float32", or "tf32" for matrix products
    most_graphs  batch sizes whose graphs are kept; past it, the one made first is given up
    """

    def __init__(self, model, *, precision="float32", most_graphs=MOST_GRAPHS):
        if most_graphs < 1:
            raise ValueError(f"most_graphs must be 1 or more, not {most_graphs}")
        self.layers, self.precision = weights_of(model), precision
        self.n_classes = len(self.layers["fc2"][1])
        self.device, self.most_graphs = self.layers["fc2"][1].device, most_graphs
        self.graphs, self.pool = {}, None

    def __call__(self, x):
        """Logits, float32 (N, classes), for images `x`, float32 (N, 1, 28, 28), on a GPU.

        On a GPU they lie in memory of the graph's, which the next call overwrites: `clone` what
        must last. Raises ValueError for images of another kind.
        """
        if x.dtype != torch.float32 or x.dim() != 4 or x.shape[1:] != (1, 28, 28):
            raise ValueError(f"x must be float32 (N, 1, 28, 28), not {x.dtype} {tuple(x.shape)}")
        if x.device != self.device:
            raise ValueError(f"x is on {x.device}, and the network on {self.device}")
        x = x.detach()
        if len(x) == 0:
            return x.new_empty(0, self.n_classes)
        if self.device.type != "cuda":
            return forward(self.layers, x.contiguous(), precision=self.precision)[0]
        if (kept := self.graphs.get(len(x))) is None:
            kept = self._capture(x)
        graph, images, logits = kept
        images.copy_(x)
        graph.replay()
        return logits

    def _capture(self, x):
        """Note the launches for as many images as `x` has."""
        if not device.count():
            raise RuntimeError("a CUDA graph needs a GPU")
        if len(self.graphs) >= self.most_graphs:
            del self.graphs[next(iter(self.graphs))]
        with torch.cuda.device(self.device):
            images = x.clone(memory_format=torch.contiguous_format)
            forward(self.layers, images, precision=self.precision)  # loads what is captured next
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with capture(graph, pool=self.pool):
                logits, _ = forward(self.layers, images, precision=self.precision)
        self.graphs[len(x)] = graph, images, logits
        return self.graphs[len(x)]
