"""Inputs and error budgets that tests and benchmarks share."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attention_kernels.canvas_attention import AttentionOptions, PagedCache, Sequences
from attention_kernels.vocab_statistics import NO_ID, LogitAdjustments, RowDraws

# What a kernel must never read, or must read without a trace in a live row.
GARBAGE_BLOCK = 2**30


@dataclass(frozen=True)
class CanvasBatch:
    """The tensors of one ``canvas_attention`` call."""

    query: Tensor  # [num_tokens, num_q_heads, head_dim]
    key_cache: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor  # like key_cache
    block_table: Tensor  # [num_seqs, max_blocks]
    query_start_loc: Tensor  # [num_seqs + 1]
    seq_lens: Tensor  # [num_seqs]
    causal_rows: Tensor  # [num_seqs]
    row_spans: Tensor | None = None  # [num_tokens, 2]

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def arguments(
        self,
        options: AttentionOptions,
        *,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        scales: tuple[float | Tensor, float | Tensor] | tuple[()] = (),
    ) -> tuple[Tensor, PagedCache, Sequences, AttentionOptions]:
        """Arguments of ``canvas_attention``, with the bounds of its sequences and an FP8 cache's
        scales.
        """
        sequences = Sequences(
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.causal_rows,
            self.row_spans,
            max_query_len,
            max_seq_len,
        )
        cache = PagedCache(self.key_cache, self.value_cache, *scales)
        return self.query, cache, sequences, options

    @property
    def num_live_tokens(self) -> int:
        """Rows that belong to a sequence; the rest is padding."""
        return int(self.query_start_loc[-1])


def make_canvas_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    causal_rows: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    padded_rows: int = 0,
    row_spans: Sequence[tuple[int, int]] | None = None,
    strided_query: bool = False,
    joint_cache: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> CanvasBatch:
    """Make a batch of random sequences on scattered blocks, with all memory that is not live
    poisoned.

    Args:
        query_lens: Query rows of each sequence.
        seq_lens: Keys of each sequence, its query rows included.
        causal_rows: Leading causal rows of each sequence.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Head size.
        block_size: Positions in a cache block.
        dtype: Of the query, and of the cache unless ``cache_dtype`` differs.
        cache_dtype: float8_e4m3fn for a quantised cache.
        padded_rows: Query rows after the last sequence.
        row_spans: (start, end) for each live query row.
        strided_query: True if the query is a slice of a wider tensor, as after a fused projection.
        joint_cache: True if keys and values lie side by side per head in one tensor, as in vLLM
            0.33; false if each has its own.
        device: Device of the tensors.
        seed: Seed of every random draw.

    Returns:
        The batch. Cache blocks that no sequence uses, positions after a sequence's last key and
        padded query rows are NaN; unused entries of the block table point outside the cache.
    """
    # Tensors are drawn on their device in their dtype: benchmarks make batches of tens of
    # gigabytes.
    generator = torch.Generator(device).manual_seed(seed)
    num_seqs = len(query_lens)
    used = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(used) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    block_table = torch.full((num_seqs, max([*used, 1]) + 1), GARBAGE_BLOCK, dtype=torch.int32)
    live = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for seq, count in enumerate(used):
        blocks = order[taken : taken + count]
        taken += count
        block_table[seq, :count] = blocks.to(torch.int32)
        live.view(-1)[_positions(blocks, block_size)[: seq_lens[seq]]] = True

    caches = torch.empty(
        (num_blocks, num_kv_heads, block_size, 2 * head_dim), dtype=dtype, device=device
    ).normal_(generator=generator)
    caches.masked_fill_(~live[:, None, :, None].to(device), float("nan"))
    caches = caches.to(cache_dtype or dtype)
    joint = caches.transpose(1, 2)
    key_cache, value_cache = joint[..., :head_dim], joint[..., head_dim:]
    if not joint_cache:
        key_cache, value_cache = key_cache.contiguous(), value_cache.contiguous()

    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_live = int(starts[-1])
    num_tokens = num_live + padded_rows
    width = head_dim + 8 if strided_query else head_dim
    query = torch.empty((num_tokens, num_heads, width), dtype=dtype, device=device)
    query.normal_(generator=generator)
    query[num_live:] = float("nan")
    spans = None
    if row_spans is not None:
        spans = torch.full((num_tokens, 2), GARBAGE_BLOCK, dtype=torch.int32)
        spans[:num_live] = torch.tensor(row_spans, dtype=torch.int32).view(num_live, 2)
    return CanvasBatch(
        query=query[..., :head_dim],
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table.to(device),
        query_start_loc=starts.to(device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        causal_rows=torch.tensor(causal_rows, dtype=torch.int32, device=device),
        row_spans=None if spans is None else spans.to(device),
    )


def make_draws(rows: int, generator: torch.Generator) -> RowDraws:
    """Random temperatures and keys; every third row is greedy."""

    def integers(high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(0, high, (rows,), generator=generator).to(dtype)

    temperature = torch.rand(rows, generator=generator) + 0.3
    request_temperature = torch.rand(rows, generator=generator) * 2
    request_temperature[::3] = 0.0
    return RowDraws(
        temperature,
        request_temperature,
        torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        integers(50, torch.int32),
        integers(48, torch.int32),
        integers(256, torch.int32),
    )


def make_adjustments(rows: int, vocab_size: int, generator: torch.Generator) -> LogitAdjustments:
    """Biases, allowed ids, penalties, masks and pins for some of the rows, one or all of them."""

    def index(high: int) -> Tensor:
        return torch.randint(-1, high, (rows,), generator=generator, dtype=torch.int32)

    def bit_masks(tables: int) -> Tensor:
        size = (tables, -(-vocab_size // 32))
        return torch.randint(-(2**31), 2**31, size, generator=generator).to(torch.int32)

    # One list of biases, some of which forbid, and one of allowed ids.
    listed_ids = torch.full((2, 64), NO_ID, dtype=torch.int32)
    listed_offsets = torch.randn(2, 64, generator=generator) * 2
    listed_offsets[0, torch.rand(64, generator=generator) < 0.3] = float("-inf")
    # Something stays possible in every row.
    possible = vocab_size // 2
    for row in listed_ids:
        ids = torch.randperm(vocab_size, generator=generator)[:40].tolist()
        ids = sorted({*ids, possible})
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    listed_offsets[listed_ids == possible] = 0.0
    masks = bit_masks(2)
    masks[:, possible >> 5] |= torch.tensor(1 << (possible & 31)).to(torch.int32)
    counts = torch.randint(0, 3, (3, vocab_size), generator=generator, dtype=torch.int32)
    pin = torch.randint(0, vocab_size, (rows,), generator=generator, dtype=torch.int32)
    return LogitAdjustments(
        list_idx=index(2),
        listed_ids=listed_ids,
        listed_offsets=listed_offsets,
        other_offsets=torch.tensor([0.0, float("-inf")]),
        penalty_idx=index(3),
        repetition=torch.rand(3, generator=generator) + 0.5,
        frequency=torch.randn(3, generator=generator),
        presence=torch.randn(3, generator=generator),
        prompt_mask=bit_masks(3),
        output_counts=counts,
        mask_idx=index(2),
        masks=masks,
        pin=torch.where(torch.rand(rows, generator=generator) < 0.2, pin, -1),
    )


def assert_within_error_budget(
    actual: Tensor, same_dtype_ref: Tensor, fp64_ref: Tensor, name: str, factor: float = 2.0
) -> None:
    """Assert that a result is as close to fp64 as plain PyTorch in the same dtype, up to a
    factor.
    """
    assert torch.isfinite(actual).all(), f"{name}: non-finite values"
    if fp64_ref.numel() == 0:
        return
    rounding = torch.finfo(same_dtype_ref.dtype).eps * fp64_ref.abs().max().item()
    budget = factor * ((same_dtype_ref.double() - fp64_ref).abs().max().item() + rounding)
    error = (actual.double() - fp64_ref).abs().max().item()
    assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e}"


def _positions(blocks: Tensor, block_size: int) -> Tensor:
    """Slots of these blocks in a cache flattened over blocks and positions."""
    return (blocks[:, None] * block_size + torch.arange(block_size)).flatten()
