"""NumPy in place of the runner's small Triton kernels, which dominate a step when interpreted.

Registered through vLLM's own dispatcher. Each function does what one launch of the kernel of the
same name does: it writes into the tensors of the launch, which have the kernel's names
(:mod:`.launches`). All tensors are on the CPU, so ``.numpy()`` shares their memory.
"""

import ctypes

import numpy as np

from vllm_diffusion.cpu.launches import Functions, Launch, overrides
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


def apply_write(of: Launch) -> None:
    """Copy staged rows; with groups, ``output`` holds the address of each group's table."""
    contents = of.write_contents.numpy()
    begin = 0
    writes = [each.tolist() for each in (of.write_indices, of.write_starts, of.write_cu_lens)]
    for i, (row, start, end) in enumerate(zip(*writes, strict=True)):
        values = contents[begin:end]
        begin = end
        if of.MULTI_GROUP:
            group = int(of.write_group_ids[i])
            stride = int(of.output_stride[group])
            offset = row * stride + start
            target = _int32_at(int(of.output[group]) + 4 * offset, len(values))
            target[:] = values
        else:
            flat = of.output.numpy().reshape(-1)
            offset = row * of.output_stride + start
            flat[offset : offset + len(values)] = values


def gather_block_tables(of: Launch) -> None:
    """Each request's block ids, with blocks wholly below a sliding window nulled."""
    requests = of.batch_idx_to_req_idx.tolist()
    for group in range(of.src_block_table_ptrs.shape[0]):
        stride = int(of.block_table_strides[group])
        source = int(of.src_block_table_ptrs[group])
        target = int(of.dst_block_table_ptrs[group])
        reach = int(of.sliding_window_reach[group]) if of.MASK_SLIDING_WINDOW else 0
        for row, request in enumerate(requests[: of.num_reqs]):
            count = int(of.num_blocks[group, request])
            ids = _int32_at(target + 4 * row * stride, stride)
            ids[:count] = _int32_at(source + 4 * request * stride, stride)[:count]
            # Rows of an earlier, longer request keep nothing of it.
            ids[count:] = 0
            if reach > 0:
                below = max(int(of.num_computed_tokens[request]) - reach, 0)
                ids[: min(below // int(of.block_sizes[group]), count)] = 0


def compute_slot_mappings(of: Launch) -> None:
    """Compute the cache slots of each token's key and value; padding gets none."""
    if of.CP_SIZE != 1:
        raise NotImplementedError("context parallelism is not served on the CPU platform")
    starts = of.query_start_loc.tolist()
    positions = of.pos.numpy()
    requests = of.idx_mapping.tolist()
    for group in range(of.block_table_ptrs.shape[0]):
        slots = of.slot_mappings[group].numpy()
        slots[starts[len(requests)] : of.max_num_tokens] = of.PAD_ID
        block_size = int(of.block_sizes[group])
        stride = int(of.block_table_strides[group])
        table = int(of.block_table_ptrs[group])
        for row, request in enumerate(requests):
            first, end = starts[row], starts[row + 1]
            if request < 0 or not bool(of.slot_mapping_enabled[group]):
                slots[first:end] = of.PAD_ID
                continue
            ids = _int32_at(table + 4 * request * stride, stride)
            where = positions[first:end]
            slots[first:end] = (
                ids[where // block_size].astype(np.int64) * block_size + where % block_size
            )


def prepare_prefill_inputs(of: Launch) -> None:
    """Token ids of prompt rows, and the few that follow them."""
    starts = of.query_start_loc.tolist()
    for row, request in enumerate(of.idx_mapping.tolist()):
        prefill_len = int(of.prefill_lens[request])
        computed = int(of.num_computed_tokens[request])
        if computed >= prefill_len:
            continue
        length = starts[row + 1] - starts[row]
        tokens = of.all_token_ids[request]
        of.input_ids[starts[row] : starts[row + 1]] = tokens[computed : computed + length]
        for ahead in range(of.num_lookahead):
            position = computed + length + ahead
            of.next_prefill_tokens[ahead, request] = (
                tokens[position] if position < prefill_len else 0
            )


def prepare_pos_seq_lens(of: Launch) -> None:
    """Positions of all rows and lengths of all sequences."""
    positions, lens = of.pos.numpy(), of.seq_lens.numpy()
    starts = of.query_start_loc.tolist()
    requests = of.idx_mapping.tolist()
    lens[len(requests) : of.max_num_reqs] = 0
    for row, request in enumerate(requests):
        computed = int(of.num_computed_tokens[request])
        length = starts[row + 1] - starts[row]
        lens[row] = computed + length
        positions[starts[row] : starts[row + 1]] = np.arange(computed, computed + length)


def combine_tokens(of: Launch) -> None:
    """Write the indices of sampled rows, and the sampled and draft tokens among the inputs."""
    ends = of.query_start_loc.tolist()[1:]
    bounds = of.cu_num_logits.tolist()
    indices = of.logits_indices.numpy()
    for row, request in enumerate(of.idx_mapping.tolist()):
        num_logits = bounds[row + 1] - bounds[row]
        first = ends[row] - num_logits
        indices[bounds[row] : bounds[row + 1]] = np.arange(first, ends[row])
        length, prompt = int(of.seq_lens[row]), int(of.prefill_len[request])
        if length <= prompt:
            continue
        if of.NUM_NEW_SAMPLED_TOKENS > 0 and length - num_logits >= prompt:
            of.input_ids[first] = of.last_sampled_tokens[request].reshape(-1)[0]
        num_drafts = num_logits - of.NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            of.input_ids[ends[row] - num_drafts : ends[row]] = of.draft_tokens[request, :num_drafts]


def post_update(of: Launch) -> None:
    """Append what was sampled and advance each sequence by what was kept."""
    starts = None if of.query_start_loc is None else of.query_start_loc.tolist()
    for row, request in enumerate(of.idx_mapping.tolist()):
        if request < 0:
            continue
        if of.draft_tokens is not None and of.draft_tokens_out is not None:
            drafts = of.draft_tokens[row, : of.num_draft_tokens]
            of.draft_tokens_out[request, : of.num_draft_tokens] = drafts
        count = int(of.num_sampled[row])
        if count > 0:
            tokens = of.sampled_tokens[row, :count]
            length = int(of.total_len[request])
            of.last_sampled_tokens[request] = tokens[-1]
            of.total_len[request] = length + count
            of.all_token_ids[request, length : length + count] = tokens
            if of.output_bin_counts is not None:
                of.output_bin_counts[request].index_add_(
                    0, tokens.long(), of.output_bin_counts.new_ones(count)
                )
        query_len = 0 if starts is None else starts[row + 1] - starts[row]
        of.num_computed_tokens[request] += query_len - int(of.num_rejected[row])


def expand_idx_mapping(of: Launch) -> None:
    """The request and the position within it of each sampled row."""
    bounds = of.cu_num_logits.tolist()
    requests, positions = of.expanded_idx_mapping.numpy(), of.expanded_local_pos.numpy()
    for row, request in enumerate(of.idx_mapping.tolist()):
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
