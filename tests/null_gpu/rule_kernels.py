"""A Triton kernel whose shared memory grows with its tile."""

import triton
import triton.language as tl


@triton.jit
def square(x_ptr, block: tl.constexpr):
    """Multiplies a tile of ``block`` x ``block`` numbers by itself."""
    index = tl.arange(0, block)[:, None] * block + tl.arange(0, block)[None, :]
    tile = tl.load(x_ptr + index)
    tl.store(x_ptr + index, tl.dot(tile, tile).to(tile.dtype))
