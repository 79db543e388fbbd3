"""NumPy in place of the runner's small Triton kernels, which dominate a step when interpreted.

Registered through vLLM's own dispatcher. Each function does what one launch of the kernel of the
same name does: it writes into the tensors it is given, which have the kernel's names
(:mod:`.launches`). All tensors are on the CPU, so ``.numpy()`` shares their memory.
"""

# ruff: noqa: N803

import ctypes
from typing import Any

import numpy as np
from torch import Tensor

from vllm_diffusion.cpu.launches import Functions, overrides
from vllm_diffusion.hooks.own_entry_points import own_entry_points

_RUNNER = "vllm.v1.worker.gpu."


def register() -> None:
    """Put them in place. Safe to call twice."""
    from vllm.triton_utils import dispatcher

    from vllm_diffusion.cpu import sampling_kernels

    functions = OVERRIDES | sampling_kernels.OVERRIDES
    for entry in own_entry_points("vllm_diffusion.cpu_kernels"):
        functions |= entry.load()
    new = {name: each for name, each in functions.items() if name not in dispatcher._registry}
    if new:
        dispatcher.register_kernels(overrides(new))


def _int32_at(address: int, size: int) -> np.ndarray:
    """``size`` int32 values at a raw address, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_int32 * size).from_address(address))


def apply_write(
    output: Tensor,
    output_stride: Any,
    write_indices: Tensor,
    write_starts: Tensor,
    write_contents: Tensor,
    write_cu_lens: Tensor,
    write_group_ids: Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Copy staged rows; with groups, ``output`` holds the address of each group's table."""
    contents = write_contents.numpy()
    begin = 0
    for i, (row, start, end) in enumerate(
        zip(write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist(), strict=True)
    ):
        values = contents[begin:end]
        begin = end
        if MULTI_GROUP:
            assert write_group_ids is not None
            group = int(write_group_ids[i])
            stride = int(output_stride[group])
            offset = row * stride + start
            target = _int32_at(int(output[group]) + 4 * offset, len(values))
            target[:] = values
        else:
            flat = output.numpy().reshape(-1)
            offset = row * output_stride + start
            flat[offset : offset + len(values)] = values


def gather_block_tables(
    batch_idx_to_req_idx: Tensor,
    src_block_table_ptrs: Tensor,
    dst_block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    num_blocks: Tensor,
    num_reqs: int,
    num_computed_tokens: Tensor,
    sliding_window_reach: Tensor,
    block_sizes: Tensor,
    MASK_SLIDING_WINDOW: bool,
) -> None:
    """Each request's block ids, with blocks wholly below a sliding window nulled."""
    requests = batch_idx_to_req_idx.tolist()
    for group in range(src_block_table_ptrs.shape[0]):
        stride = int(block_table_strides[group])
        source = int(src_block_table_ptrs[group])
        target = int(dst_block_table_ptrs[group])
        reach = int(sliding_window_reach[group]) if MASK_SLIDING_WINDOW else 0
        for row, request in enumerate(requests[:num_reqs]):
            count = int(num_blocks[group, request])
            ids = _int32_at(target + 4 * row * stride, stride)
            ids[:count] = _int32_at(source + 4 * request * stride, stride)[:count]
            # Rows of an earlier, longer request keep nothing of it.
            ids[count:] = 0
            if reach > 0:
                below = max(int(num_computed_tokens[request]) - reach, 0)
                ids[: min(below // int(block_sizes[group]), count)] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    pos: Tensor,
    block_table_ptrs: Tensor,
    block_table_strides: Tensor,
    block_sizes: Tensor,
    slot_mapping_enabled: Tensor,
    slot_mappings: Tensor,
    CP_SIZE: int,
    PAD_ID: int,
) -> None:
    """Compute the cache slots of each token's key and value; padding gets none."""
    if CP_SIZE != 1:
        raise NotImplementedError("context parallelism is not served on the CPU platform")
    starts = query_start_loc.tolist()
    positions = pos.numpy()
    requests = idx_mapping.tolist()
    for group in range(block_table_ptrs.shape[0]):
        slots = slot_mappings[group].numpy()
        slots[starts[len(requests)] : max_num_tokens] = PAD_ID
        block_size = int(block_sizes[group])
        stride = int(block_table_strides[group])
        table = int(block_table_ptrs[group])
        for row, request in enumerate(requests):
            first, end = starts[row], starts[row + 1]
            if request < 0 or not bool(slot_mapping_enabled[group]):
                slots[first:end] = PAD_ID
                continue
            ids = _int32_at(table + 4 * request * stride, stride)
            where = positions[first:end]
            slots[first:end] = (
                ids[where // block_size].astype(np.int64) * block_size + where % block_size
            )


def prepare_prefill_inputs(
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
) -> None:
    """Token ids of prompt rows, and the few that follow them."""
    starts = query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        prefill_len = int(prefill_lens[request])
        computed = int(num_computed_tokens[request])
        if computed >= prefill_len:
            continue
        length = starts[row + 1] - starts[row]
        tokens = all_token_ids[request]
        input_ids[starts[row] : starts[row + 1]] = tokens[computed : computed + length]
        for ahead in range(num_lookahead):
            position = computed + length + ahead
            next_prefill_tokens[ahead, request] = tokens[position] if position < prefill_len else 0


def prepare_pos_seq_lens(
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
) -> None:
    """Positions of all rows and lengths of all sequences."""
    positions, lens = pos.numpy(), seq_lens.numpy()
    starts = query_start_loc.tolist()
    requests = idx_mapping.tolist()
    lens[len(requests) : max_num_reqs] = 0
    for row, request in enumerate(requests):
        computed = int(num_computed_tokens[request])
        length = starts[row + 1] - starts[row]
        lens[row] = computed + length
        positions[starts[row] : starts[row + 1]] = np.arange(computed, computed + length)


def combine_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Write the indices of sampled rows, and the sampled and draft tokens among the inputs."""
    ends = query_start_loc.tolist()[1:]
    bounds = cu_num_logits.tolist()
    indices = logits_indices.numpy()
    for row, request in enumerate(idx_mapping.tolist()):
        num_logits = bounds[row + 1] - bounds[row]
        first = ends[row] - num_logits
        indices[bounds[row] : bounds[row + 1]] = np.arange(first, ends[row])
        length, prompt = int(seq_lens[row]), int(prefill_len[request])
        if length <= prompt:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and length - num_logits >= prompt:
            input_ids[first] = last_sampled_tokens[request].reshape(-1)[0]
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            input_ids[ends[row] - num_drafts : ends[row]] = draft_tokens[request, :num_drafts]


def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    total_len: Tensor,
    draft_tokens: Tensor | None,
    draft_tokens_out: Tensor | None,
    num_draft_tokens: int,
) -> None:
    """Append what was sampled and advance each sequence by what was kept."""
    starts = None if query_start_loc is None else query_start_loc.tolist()
    for row, request in enumerate(idx_mapping.tolist()):
        if request < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[request, :num_draft_tokens] = draft_tokens[row, :num_draft_tokens]
        count = int(num_sampled[row])
        if count > 0:
            tokens = sampled_tokens[row, :count]
            length = int(total_len[request])
            last_sampled_tokens[request] = tokens[-1]
            total_len[request] = length + count
            all_token_ids[request, length : length + count] = tokens
            if output_bin_counts is not None:
                output_bin_counts[request].index_add_(
                    0, tokens.long(), output_bin_counts.new_ones(count)
                )
        query_len = 0 if starts is None else starts[row + 1] - starts[row]
        num_computed_tokens[request] += query_len - int(num_rejected[row])


def expand_idx_mapping(
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    cu_num_logits: Tensor,
) -> None:
    """The request and the position within it of each sampled row."""
    bounds = cu_num_logits.tolist()
    requests, positions = expanded_idx_mapping.numpy(), expanded_local_pos.numpy()
    for row, request in enumerate(idx_mapping.tolist()):
        requests[bounds[row] : bounds[row + 1]] = request
        positions[bounds[row] : bounds[row + 1]] = np.arange(bounds[row + 1] - bounds[row])


OVERRIDES: dict[str, Functions] = {
    _RUNNER + "buffer_utils._apply_write_kernel": (apply_write,),
    _RUNNER + "block_table._gather_block_tables_kernel": (gather_block_tables,),
    _RUNNER + "block_table._compute_slot_mappings_kernel": (compute_slot_mappings,),
    _RUNNER + "input_batch._prepare_prefill_inputs_kernel": (prepare_prefill_inputs,),
    _RUNNER + "input_batch._prepare_pos_seq_lens_kernel": (prepare_pos_seq_lens,),
    _RUNNER + "input_batch._combine_sampled_and_draft_tokens_kernel": (combine_tokens,),
    _RUNNER + "input_batch._post_update_kernel": (post_update,),
    _RUNNER + "input_batch._expand_idx_mapping_kernel": (expand_idx_mapping,),
}
