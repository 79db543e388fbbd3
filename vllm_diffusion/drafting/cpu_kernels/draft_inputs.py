"""NumPy in place of the Triton kernel for a DFlash draft's inputs; see
``vllm_diffusion.cpu.kernels``.

Kernels for the inputs of other methods are interpreted.
"""

from typing import Any

import numpy as np

from vllm_diffusion.cpu.launches import Functions, Launch


def _slots(of: Launch, req: int, where: Any) -> Any:
    """Return the cache slots of a request's positions; padding where it has no block."""
    blocks = np.minimum(where // of.block_size, of.block_table.shape[1] - 1)
    ids = of.block_table.numpy()[req, blocks].astype(np.int64)
    # Block 0 belongs to no request.
    return np.where(ids != 0, ids * of.block_size + where % of.block_size, of.PAD_SLOT_ID)


def dflash_inputs(of: Launch) -> None:
    """Write positions and slots of the context, each request's block, and what is sampled of it.

    The context's rejected tokens, and those that are before a window, get no slot. A block is
    the anchor and its masks.
    """
    if of.CP_SIZE != 1:
        raise NotImplementedError("context parallelism is not served on the CPU platform")
    starts, requests = of.target_query_start_loc.tolist(), of.idx_mapping.tolist()
    num_reqs, width, steps = len(requests), of.num_query_per_req, of.num_speculative_steps
    skipped = 0 if of.SAMPLE_FROM_ANCHOR else 1
    for req, request in enumerate(requests):
        first, end = starts[req], starts[req + 1]
        valid_end = end - int(of.num_rejected[req])
        context = of.target_positions[first:valid_end].numpy()
        of.out_context_positions[first:end] = 0
        of.out_context_positions.numpy()[first:valid_end] = context
        of.out_context_slot_mapping[first:end] = of.PAD_SLOT_ID
        of.out_context_slot_mapping.numpy()[first:valid_end] = _slots(of, req, context)

        known = of.last_sampled if int(of.num_sampled[req]) > 0 else of.next_prefill_tokens
        block = int(context[-1]) + 1 + np.arange(width)
        rows = slice(req * width, (req + 1) * width)
        of.out_input_ids[rows] = of.parallel_drafting_token_id
        of.out_input_ids[rows.start] = known.flatten()[request]
        of.out_is_padding[rows] = False
        of.out_query_positions.numpy()[rows] = np.minimum(block, of.max_model_len - 1)
        of.out_query_slot_mapping.numpy()[rows] = _slots(of, req, block)
        of.out_query_start_loc[req] = rows.start
        of.out_seq_lens[req] = min(int(block[-1]) + 1, of.max_model_len)

        samples = slice(req * steps, (req + 1) * steps)
        of.out_sample_indices.numpy()[samples] = rows.start + np.arange(skipped, width)
        of.out_sample_pos.numpy()[samples] = block[skipped:] + (1 - skipped)
        of.out_sample_idx_mapping[samples] = request
        of.out_temperature[request] = of.temperature[request]
        of.out_seeds[request] = of.seeds[request]
    of.out_query_start_loc[num_reqs : of.max_num_reqs + 1] = num_reqs * width
    of.out_seq_lens[num_reqs : of.max_num_reqs] = 0
    for buffer, value in (
        (of.out_input_ids, 0),
        (of.out_query_positions, 0),
        (of.out_is_padding, True),
        (of.out_query_slot_mapping, of.PAD_SLOT_ID),
    ):
        buffer[num_reqs * width : of.max_num_tokens] = value
    padding = slice(num_reqs * steps, of.max_num_reqs * steps)
    of.out_sample_indices[padding] = 0
    of.out_sample_pos[padding] = 0
    of.out_sample_idx_mapping[padding] = -1


OVERRIDES: dict[str, Functions] = {
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": (
        dflash_inputs,
    ),
}
