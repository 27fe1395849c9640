"""What all of our layers have in common."""

from torch.fx import Proxy
from torch.overrides import has_torch_function


class Layer:
    """Stands before PyTorch's class among the bases of each of our layers.

    So a layer is one of PyTorch's to all who ask, and needs nothing that PyTorch's does not have:
    ``layer.__class__`` may be changed from PyTorch's class to ours, and back.

    inner         names of modules in it whose parameters it reads itself: no layers of the network
    holds_layers  whether what it computes is done by modules in it, which are layers themselves
    """

    inner = ()
    holds_layers = False

    def _call_impl(self, *args, **kwargs):
        # A layer is one node of a graph of torch.fx, as PyTorch's are; its hooks run with it.
        if has_torch_function(args):
            for x in args:
                if isinstance(x, Proxy):
                    name = x.tracer.path_of_module(self)
                    return x.tracer.create_proxy("call_module", name, args, kwargs)
        return super()._call_impl(*args, **kwargs)

    @staticmethod
    def fault(layer):
        """Why our kernels can't compute what `layer`, of PyTorch's class, does; or None."""
