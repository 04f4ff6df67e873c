"""The packer, with all kinds of values registered."""

from rlskip.format import arrays, batches, objects, plain, tensors  # noqa: F401
from rlskip.format.codec import Packer, register_codec

objects.add_packers()

__all__ = ["Packer", "register_codec"]
