"""torchvision's squeeze-and-excitation on our kernels. Imported where a model has such blocks."""

from torchvision.ops import misc

from course_lib.nn.squeeze_excitation import Fused


class FusedSqueezeExcitation(Fused, misc.SqueezeExcitation):
    original = misc.SqueezeExcitation


#: Class of a block -> the class that takes its place.
BLOCKS = {misc.SqueezeExcitation: FusedSqueezeExcitation}
#: Class of a block that is left as it is -> why.
LEFT = {}
