"""The embeddings of a tile weighted by its ids' weights, where there are any.

A program adds to ``ROWS`` rows and ``COLUMNS`` columns. It reads which chunks of ids have a weight in one
of its rows, as bits, and walks from bit to bit: the other chunks are neither read nor multiplied, and
where there are none at all neither are the sums. How far a program walks it finds on the device, so that
the launch is the same for every tile, and a graph can hold it.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.vocab_statistics.running import CHUNK

# Chosen without a GPU. A program reads (ROWS + COLUMNS) * CHUNK numbers for ROWS * COLUMNS * CHUNK products,
# from the L2 cache, which bounds it while nothing is left out: the larger the better. Rows of one or two
# canvases are too few for that: with 64 of them a pass of 256 has 88 programs, of 132
# multiprocessors, and fewer rows have fewer chunks between them.
MANY_ROWS = 1024
# Chunks whose bits are looked at together.
WORD = 32


# Rows change between passes, and must not compile the kernel anew when they happen to be 1 or a multiple
# of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _add_product_kernel(
    product_ptr,
    product_stride,
    weights_ptr,
    weights_stride,
    embedding_ptr,
    embedding_stride,
    occupied_ptr,
    occupied_stride,
    num_rows,
    num_ids,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    WORD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < num_rows)[:, None], (column < hidden_size)[None, :]
    in_chunk, in_word = tl.arange(0, CHUNK), tl.arange(0, WORD)
    num_chunks = tl.cdiv(num_ids, CHUNK)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    num_occupied = 0
    for word in range(0, num_chunks, WORD):
        chunks = word + in_word
        flags = tl.load(
            occupied_ptr + row[:, None] * occupied_stride + chunks[None, :],
            mask=is_row & (chunks < num_chunks)[None, :],
            other=0,
        )
        is_occupied = tl.max(flags.to(tl.int32), axis=0)
        bits = tl.sum(is_occupied.to(tl.int64) << in_word, axis=0)
        in_this = tl.sum(is_occupied, axis=0)
        num_occupied += in_this
        for _ in range(in_this):
            # The lowest bit is a power of two, and which one its float's exponent.
            lowest = bits & -bits
            bits ^= lowest
            place = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            ids = (word + place) * CHUNK + in_chunk
            weights = tl.load(
                weights_ptr + row[:, None] * weights_stride + ids[None, :],
                mask=is_row & (ids < num_ids)[None, :],
                other=0.0,
            )
            embedding = tl.load(
                embedding_ptr + ids.to(tl.int64)[:, None] * embedding_stride + column[None, :],
                mask=(ids < num_ids)[:, None] & is_column,
                other=0.0,
            )
            sums = tl.dot(weights, embedding, sums, input_precision="ieee")
    if num_occupied > 0:
        at = product_ptr + row[:, None] * product_stride + column[None, :]
        inside = is_row & is_column
        tl.store(at, tl.load(at, mask=inside, other=0.0) + sums, mask=inside)


def add_product(product: Tensor, weights: Tensor, embedding: Tensor, occupied: Tensor) -> None:
    for name, tensor in (("weights", weights), ("product", product), ("embedding", embedding)):
        if tensor.stride(1) != 1:
            raise ValueError(f"The last dimension of {name} must be contiguous.")
    num_rows, num_ids = weights.shape
    hidden_size = embedding.shape[1]
    rows, columns, warps, stages = (128, 128, 8, 3) if num_rows > MANY_ROWS else (64, 128, 4, 3)
    if weights.dtype == torch.float32:
        # No work for tensor cores: the operands go through registers, in twice the memory.
        rows, columns, warps, stages = 32, 32, 8, 2
    _add_product_kernel[triton.cdiv(num_rows, rows), triton.cdiv(hidden_size, columns)](
        product,
        product.stride(0),
        weights,
        weights.stride(0),
        embedding,
        embedding.stride(0),
        occupied,
        occupied.stride(0),
        num_rows,
        num_ids,
        hidden_size,
        ROWS=rows,
        COLUMNS=columns,
        CHUNK=CHUNK,
        WORD=WORD,
        num_warps=warps,
        num_stages=stages,
    )
