"""The two ways an image lies in memory, as the kernels of `fused` see them."""

from collections import namedtuple

from course_lib.kernels.squeeze_excite import fused_pixels as pixels
from course_lib.kernels.squeeze_excite import fused_planes as planes

#: Device functions of a layout; pool and scale are makers of them.
Layout = namedtuple("Layout", "name cut fetch share_out pool post_shares save_cut scale")
PLANES = Layout(
    "planes", planes.cut_planes, planes.fetch_planes, planes.share_out_planes, planes.pool_planes,
    planes.post_ends, planes.save_cut_plane, planes.scale_planes,
)  # fmt: skip
PIXELS = Layout(
    "pixels", pixels.cut_pixels, pixels.fetch_pixels, pixels.share_out_pixels, pixels.pool_pixels,
    pixels.post_shares, pixels.save_cut_pixels, pixels.scale_pixels,
)  # fmt: skip
