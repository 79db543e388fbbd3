"""NumPy in place of the Triton kernels for a draft's inputs; see ``vllm_diffusion.cpu.kernels``.

Names of arguments, constants among them, are those of vLLM's kernels.
"""

# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm_diffusion.cpu.launches import Functions

_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode."
_DEPENDENT = _SPEC_DECODE + "target_dependent_ar.speculator."


def _slots(block_table: Tensor, req: int, where: Any, block_size: int, none: int) -> Any:
    """Return the cache slots of a request's positions; ``none`` where it has no block."""
    blocks = np.minimum(where // block_size, block_table.shape[1] - 1)
    ids = block_table.numpy()[req, blocks].astype(np.int64)
    # Block 0 belongs to no request.
    return np.where(ids != 0, ids * block_size + where % block_size, none)


def dflash_context(
    out_context_positions: Tensor,
    out_context_slot_mapping: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    block_table: Tensor,
    block_size: int,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
) -> None:
    """Write positions and cache slots of the context's keys and values.

    Rejected tokens, and tokens that a window has left behind, get no slot.
    """
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism is not served on the CPU platform")
    starts = target_query_start_loc.tolist()
    for req in range(len(idx_mapping)):
        first, end = starts[req], starts[req + 1]
        valid_end = end - int(num_rejected[req])
        valid = target_positions[first:valid_end].numpy()
        out_context_positions[first:end] = 0
        out_context_positions.numpy()[first:valid_end] = valid
        out_context_slot_mapping[first:end] = PAD_SLOT_ID
        slots = _slots(block_table, req, valid, block_size, PAD_SLOT_ID)
        out_context_slot_mapping.numpy()[first:valid_end] = slots


def _next_position(target_positions: Tensor, starts: Tensor, num_rejected: Tensor, req: int) -> int:
    """Return the position behind a request's last valid token."""
    return int(target_positions[int(starts[req + 1]) - int(num_rejected[req]) - 1]) + 1


def dflash_blocks(
    out_input_ids: Tensor,
    out_query_positions: Tensor,
    out_is_padding: Tensor,
    out_query_start_loc: Tensor,
    out_seq_lens: Tensor,
    out_query_slot_mapping: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    idx_mapping: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    block_table: Tensor,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    PAD_SLOT_ID: int,
) -> None:
    """Write each request's rows of a block: the anchor and its masks."""
    requests, width = idx_mapping.tolist(), num_query_per_req
    num_reqs = len(requests)
    for req, request in enumerate(requests):
        known = last_sampled if int(num_sampled[req]) > 0 else next_prefill_tokens
        first = _next_position(target_positions, target_query_start_loc, num_rejected, req)
        block = first + np.arange(width)
        rows = slice(req * width, (req + 1) * width)
        out_input_ids[rows] = parallel_drafting_token_id
        out_input_ids[req * width] = known.flatten()[request]
        out_is_padding[rows] = False
        out_query_positions.numpy()[rows] = np.minimum(block, max_model_len - 1)
        slots = _slots(block_table, req, block, block_size, PAD_SLOT_ID)
        out_query_slot_mapping.numpy()[rows] = slots
        out_query_start_loc[req] = req * width
        out_seq_lens[req] = min(first + width, max_model_len)
    out_query_start_loc[num_reqs : max_num_reqs + 1] = num_reqs * width
    out_seq_lens[num_reqs:max_num_reqs] = 0
    padding = slice(num_reqs * width, max_num_tokens)
    out_input_ids[padding] = 0
    out_query_positions[padding] = 0
    out_is_padding[padding] = True
    out_query_slot_mapping[padding] = PAD_SLOT_ID


def dflash_samples(
    out_sample_indices: Tensor,
    out_sample_pos: Tensor,
    out_sample_idx_mapping: Tensor,
    out_temperature: Tensor,
    out_seeds: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    idx_mapping: Tensor,
    num_rejected: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    SAMPLE_FROM_ANCHOR: bool,
) -> None:
    """Write which rows of the blocks are sampled, for which positions, and how."""
    requests, width = idx_mapping.tolist(), num_query_per_req
    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    sampled = np.arange(skipped, width)
    for req, request in enumerate(requests):
        first = _next_position(target_positions, target_query_start_loc, num_rejected, req)
        samples = slice(req * num_speculative_steps, (req + 1) * num_speculative_steps)
        out_sample_indices.numpy()[samples] = req * width + sampled
        out_sample_pos.numpy()[samples] = first + sampled + (1 - skipped)
        out_sample_idx_mapping[samples] = request
        out_temperature[request] = temperature[request]
        out_seeds[request] = seeds[request]
    padding = slice(len(requests) * num_speculative_steps, max_num_reqs * num_speculative_steps)
    out_sample_indices[padding] = 0
    out_sample_pos[padding] = 0
    out_sample_idx_mapping[padding] = -1


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
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    max_num_reqs: int,
    ADVANCE_DRAFT_POSITIONS: bool,
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
    next_input_hidden_states: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    sample_src_positions: Tensor,
    seq_lens: Tensor,
    draft_tokens: Tensor,
    current_draft_step: Tensor,
    hidden_states: Tensor,
    hidden_size: int,
    max_model_len: int,
    num_speculative_steps: int,
    ADVANCE_DRAFT_POSITIONS: bool,
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
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    scratch: Tensor,
    L: int,
    MIN_N: int,
    MAX_N: int,
    BLOCK_L: int,
) -> None:
    """Find where the end of each sequence occurred before: the longest match, and of these the last.

    A match of ``n`` tokens at ``p`` is the number ``n * (L + 1) + p + 1``, 0 is none; each
    block of positions has its largest.
    """
    num_blocks = scratch.shape[1]
    for req, request in enumerate(idx_mapping.tolist()):
        length = int(total_len[request])
        scores = np.zeros(num_blocks * BLOCK_L, np.int64)
        if int(num_sampled[req]) > 0:
            tokens = token_ids[request, :length].numpy()
            for n in range(MIN_N, min(MAX_N, length - 1) + 1):
                windows = np.lib.stride_tricks.sliding_window_view(tokens, n)[: length - n]
                (matches,) = np.nonzero((windows == tokens[length - n :]).all(axis=1))
                scores[matches] = n * (L + 1) + matches + 1
        scratch.numpy()[req] = scores.reshape(num_blocks, BLOCK_L).max(axis=1)


def ngram_finalize(
    token_ids: Tensor,
    idx_mapping: Tensor,
    total_len: Tensor,
    num_sampled: Tensor,
    last_sampled: Tensor,
    scratch: Tensor,
    drafts: Tensor,
    L: int,
    K: int,
) -> None:
    """Propose the tokens that followed the match; without a match, the last token."""
    for req, request in enumerate(idx_mapping.tolist()):
        drafts[req] = last_sampled[request]
        score = int(scratch[req].max())
        if int(num_sampled[req]) == 0 or score == 0:
            continue
        n, where = divmod(score - 1, L + 1)
        followed = token_ids[request, n + where : min(n + where + K, int(total_len[request]))]
        drafts[req, : len(followed)] = followed


OVERRIDES: dict[str, Functions] = {
    _SPEC_DECODE + "dflash.speculator._prepare_dflash_inputs_kernel": (
        dflash_context,
        dflash_blocks,
        dflash_samples,
    ),
    _SPEC_DECODE + "standalone_ar.speculator._prepare_prefill_inputs_kernel": (standalone_prefill,),
    _DEPENDENT + "_prepare_prefill_inputs_kernel": (dependent_prefill,),
    _DEPENDENT + "_prepare_decode_inputs_kernel": (dependent_decode,),
    _DEPENDENT + "_update_draft_inputs_kernel": (dependent_update,),
    _SPEC_DECODE + "ngram.speculator._ngram_scan_kernel": (ngram_scan,),
    _SPEC_DECODE + "ngram.speculator._ngram_finalize_kernel": (ngram_finalize,),
}
