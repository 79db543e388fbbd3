"""NumPy in place of the Triton kernels for a draft's inputs; see ``vllm_diffusion.cpu.kernels``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode."


def dflash_inputs(
    out_input_ids: Tensor,
    out_query_positions: Tensor,
    out_is_padding: Tensor,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_query_slot_mapping: Tensor,
    out_context_positions: Tensor,
    out_context_slot_mapping: Tensor,
    out_sample_indices: Tensor,
    out_sample_pos: Tensor,
    out_sample_idx_mapping: Tensor,
    out_temperature: Tensor,
    out_seeds: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    *,
    SAMPLE_FROM_ANCHOR: bool,  # noqa: N803
    PAD_SLOT_ID: int,  # noqa: N803
    CP_SIZE: int,  # noqa: N803
    **_: Any,
) -> None:
    """Write each request's rows of a block, and the cache slots of its context's keys and values.

    Rejected tokens of the context, and tokens that a window has left behind, get no slot.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism is not served on the CPU platform")
    starts, positions = target_query_start_loc.tolist(), target_positions.numpy()
    tables = block_table.numpy()

    def slots(req: int, where: Any) -> Any:
        ids = tables[req, np.minimum(where // block_size, block_table_stride - 1)].astype(np.int64)
        # Block 0 belongs to no request.
        return np.where(ids != 0, ids * block_size + where % block_size, PAD_SLOT_ID)

    requests = idx_mapping.tolist()
    num_reqs, width = len(requests), num_query_per_req
    for req, request in enumerate(requests):
        first, end = starts[req], starts[req + 1]
        valid_end = end - int(num_rejected[req])
        context = np.zeros(end - first, positions.dtype)
        context[: valid_end - first] = positions[first:valid_end]
        context_slots = np.full(end - first, PAD_SLOT_ID, np.int64)
        context_slots[: valid_end - first] = slots(req, positions[first:valid_end])
        out_context_positions.numpy()[first:end] = context
        out_context_slot_mapping.numpy()[first:end] = context_slots

        known = last_sampled if int(num_sampled[req]) > 0 else next_prefill_tokens
        next_position = int(positions[valid_end - 1]) + 1
        block = next_position + np.arange(width)
        rows = slice(req * width, (req + 1) * width)
        out_input_ids[rows] = parallel_drafting_token_id
        out_input_ids[req * width] = known.flatten()[request]
        out_is_padding[rows] = False
        out_query_positions.numpy()[rows] = np.minimum(block, max_model_len - 1)
        out_query_slot_mapping.numpy()[rows] = slots(req, block)

        skipped = 0 if SAMPLE_FROM_ANCHOR else 1
        samples = slice(req * num_speculative_steps, (req + 1) * num_speculative_steps)
        sampled = np.arange(skipped, width)
        out_sample_indices.numpy()[samples] = req * width + sampled
        out_sample_pos.numpy()[samples] = next_position + sampled + (1 - skipped)
        out_sample_idx_mapping[samples] = request
        out_query_start_loc[req] = req * width
        out_seq_lens[req] = min(next_position + width, max_model_len)
        out_temperature[request] = temperature[request]
        out_seeds[request] = seeds[request]

    out_query_start_loc[num_reqs : max_num_reqs + 1] = num_reqs * width
    out_seq_lens[num_reqs:max_num_reqs] = 0
    padding = slice(num_reqs * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices[padding] = 0
    out_sample_pos[padding] = 0
    out_sample_idx_mapping[padding] = -1
    padding = slice(num_reqs * width, max_num_tokens)
    out_input_ids[padding] = 0
    out_query_positions[padding] = 0
    out_is_padding[padding] = True
    out_query_slot_mapping[padding] = PAD_SLOT_ID


def standalone_prefill(
    target_input_ids: Tensor,
    target_positions: Tensor,
    last_sampled: Tensor,
    idx_mapping: Tensor,
    out_input_ids: Tensor,
    out_positions: Tensor,
    last_token_indices: Tensor,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_rejected: Tensor,
    max_num_reqs: int,
    max_model_len: int,
    **_: Any,
) -> None:
    """Write a draft model's rows: the target's accepted ones, and the token behind them."""
    starts = query_start_loc.tolist()
    requests = idx_mapping.tolist()
    num_reqs = len(requests)
    for req, request in enumerate(requests):
        first, length = starts[req], starts[req + 1] - starts[req]
        num_valid = length - int(num_rejected[req])
        # One row more for each request before it.
        rows = slice(first + req, first + req + length + 1)
        out_input_ids[rows] = 0
        out_input_ids[rows][:num_valid] = target_input_ids[first : first + num_valid]
        out_input_ids[rows][num_valid] = last_sampled.flatten()[request]
        positions = int(target_positions[first]) + np.arange(length + 1)
        out_positions.numpy()[rows] = np.minimum(positions, max_model_len - 1)
        last_token_indices[req] = rows.start + num_valid
        out_query_start_loc[req] = rows.start
        out_seq_lens[req] = min(int(seq_lens[req]) + 1, max_model_len)
    out_query_start_loc[num_reqs : max_num_reqs + 1] = starts[num_reqs] + num_reqs
    out_seq_lens[num_reqs:max_num_reqs] = 0
    last_token_indices[num_reqs:max_num_reqs] = 0


def dependent_prefill(
    last_token_indices: Tensor,
    draft_current_step: Tensor,
    draft_input_ids: Tensor,
    draft_positions: Tensor,
    draft_query_start_loc: Tensor,
    draft_seq_lens: Tensor,
    target_input_ids: Tensor,
    target_positions: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_num_reqs: int,
    **_: Any,
) -> None:
    """Write the rows of a draft that reads the target's hidden states, each with the next token."""
    starts = query_start_loc.tolist()
    requests = idx_mapping.tolist()
    num_reqs = len(requests)
    for req, request in enumerate(requests):
        first = starts[req]
        last = starts[req + 1] - int(num_rejected[req]) - 1
        known = last_sampled if int(num_sampled[req]) > 0 else next_prefill_tokens
        draft_input_ids[first:last] = target_input_ids[first + 1 : last + 1]
        draft_input_ids[last] = known.flatten()[request]
        draft_positions[first : last + 1] = target_positions[first : last + 1]
        last_token_indices[req] = last
    draft_query_start_loc[:num_reqs] = query_start_loc[:num_reqs]
    draft_seq_lens[:num_reqs] = seq_lens[:num_reqs]
    draft_current_step.zero_()
    draft_query_start_loc[num_reqs : max_num_reqs + 1] = starts[num_reqs]
    draft_seq_lens[num_reqs:max_num_reqs] = 0
    last_token_indices[num_reqs:max_num_reqs] = 0


def dependent_decode(
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    *,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
    **_: Any,
) -> None:
    """Write one row for each request, with its first draft."""
    num_reqs = len(draft_tokens)
    query_start_loc.numpy()[: max_num_reqs + 1] = np.minimum(np.arange(max_num_reqs + 1), num_reqs)
    input_ids[:num_reqs] = draft_tokens.reshape(num_reqs, -1)[:, 0]
    sample_src_positions[:num_reqs] += 1
    lens = target_seq_lens[:num_reqs] - num_rejected[:num_reqs]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions[:num_reqs], max_model_len - 1)
        lens = (lens + 1).clamp(max=max_model_len)
    seq_lens[:num_reqs] = lens
    seq_lens[num_reqs:max_num_reqs] = 0


def dependent_update(
    output_draft_tokens: Tensor,
    output_draft_tokens_stride: int,
    next_input_hidden_states: Tensor,
    next_input_hidden_states_stride: int,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    seq_lens: Tensor,
    draft_tokens: Tensor,
    current_draft_step: Tensor,
    hidden_states: Tensor,
    hidden_states_stride: int,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    *,
    ADVANCE_DRAFT_POSITIONS: bool,  # noqa: N803
    **_: Any,
) -> None:
    """Store the drafted tokens, and make them the next rows."""
    num_reqs, step = len(draft_tokens), int(current_draft_step)
    output_draft_tokens[:num_reqs, step] = draft_tokens
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions[:num_reqs] += 1
    input_ids[:num_reqs] = draft_tokens
    next_input_hidden_states[:num_reqs, :hidden_size] = hidden_states[:num_reqs, :hidden_size]
    if ADVANCE_DRAFT_POSITIONS:
        _advance(positions[:num_reqs], max_model_len - 1)
        _advance(seq_lens[:num_reqs], max_model_len)


def _advance(values: Tensor, largest: int) -> None:
    values.add_(1).clamp_(max=largest)


def ngram_scan(
    token_ids: Tensor,
    token_ids_stride: int,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    scratch: Tensor,
    scratch_stride: int,
    max_model_len: int,
    shortest: int,
    longest: int,
    _longest_padded: int,
    block_size: int,
    **_: Any,
) -> None:
    """Find where the end of each sequence occurred before: the longest match, and of these the last.

    A match of ``n`` tokens at ``p`` is the number ``n * (max_model_len + 1) + p + 1``, 0 is none; each
    block of positions has its largest.
    """
    num_blocks = scratch.shape[1]
    for req, request in enumerate(idx_mapping.tolist()):
        length = int(total_len[request])
        scores = np.zeros(num_blocks * block_size, np.int64)
        if int(num_sampled[req]) > 0:
            tokens = token_ids[request, :length].numpy()
            for n in range(shortest, min(longest, length - 1) + 1):
                windows = np.lib.stride_tricks.sliding_window_view(tokens, n)[: length - n]
                (matches,) = np.nonzero((windows == tokens[length - n :]).all(axis=1))
                scores[matches] = n * (max_model_len + 1) + matches + 1
        scratch.numpy()[req] = scores.reshape(num_blocks, block_size).max(axis=1)


def ngram_finalize(
    token_ids: Tensor,
    token_ids_stride: int,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    last_sampled: Tensor,
    scratch: Tensor,
    scratch_stride: int,
    drafts: Tensor,
    max_model_len: int,
    num_blocks: int,
    num_drafts: int,
    *_padded: int,
    **_: Any,
) -> None:
    """Propose the tokens that followed the match; without a match, the last token."""
    for req, request in enumerate(idx_mapping.tolist()):
        drafts[req] = last_sampled[request]
        score = int(scratch[req].max())
        if int(num_sampled[req]) == 0 or score == 0:
            continue
        n, where = divmod(score - 1, max_model_len + 1)
        followed = token_ids[
            request, n + where : min(n + where + num_drafts, int(total_len[request]))
        ]
        drafts[req, : len(followed)] = followed


OVERRIDES: dict[str, Callable[..., None]] = {
    _SPEC_DECODE + "dflash.speculator._prepare_dflash_inputs_kernel": dflash_inputs,
    _SPEC_DECODE + "standalone_ar.speculator._prepare_prefill_inputs_kernel": standalone_prefill,
    _SPEC_DECODE + "target_dependent_ar.speculator._prepare_prefill_inputs_kernel": (
        dependent_prefill
    ),
    _SPEC_DECODE + "target_dependent_ar.speculator._prepare_decode_inputs_kernel": (
        dependent_decode
    ),
    _SPEC_DECODE + "target_dependent_ar.speculator._update_draft_inputs_kernel": dependent_update,
    _SPEC_DECODE + "ngram.speculator._ngram_scan_kernel": ngram_scan,
    _SPEC_DECODE + "ngram.speculator._ngram_finalize_kernel": ngram_finalize,
}
