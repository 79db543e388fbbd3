"""NumPy in place of the Triton kernels that verify drafts; see
``vllm_diffusion.cpu.sampling_kernels``.

Block and synthetic verification and laws of drafts ("probabilistic") are interpreted, but for what
is drawn in the end: the interpreter has no ``log1p``. FLy and watermarks are refused when the
platform is configured.
"""

import numpy as np
from torch import Tensor

from attention_kernels.noise import halves, philox
from vllm_diffusion.cpu.launches import Functions, Launch
from vllm_diffusion.cpu.sampling_kernels import block_argmax, in_blocks, noised

_GPU = "vllm.v1.worker.gpu."
_VERIFY = _GPU + "spec_decode.rejection_sampler_utils."
_LEAST_UNIFORM = np.float32(4.6566127342e-10)
_ZERO = np.float32(0)


def _number(element: Tensor) -> np.float32:
    return np.float32(element.item())


def _uniform(seed: int, offset: int) -> np.float32:
    """Return what Triton's ``tl.rand`` gives, without its zero: Philox of ten rounds."""
    word = philox((*halves(offset), 0, 0), halves(seed))[0]
    # The complement of what is negative as a signed integer.
    positive = word ^ 0xFFFFFFFF if word >> 31 else word
    return max(np.float32(positive) * _LEAST_UNIFORM, _LEAST_UNIFORM)


def gather_draft_sampled(of: Launch) -> None:
    """Gather token and position of each sampled row; placeholders of drafts in a prompt give -1."""
    where, step = of.positions[of.logits_indices], of.expanded_local_pos
    is_prompt = where - step < of.prefill_len[of.expanded_idx_mapping]
    of.draft_sampled[:] = of.input_ids[of.logits_indices].masked_fill((step > 0) & is_prompt, -1)
    of.pos[:] = where


def num_sampled_and_rejected(of: Launch) -> None:
    """Count each request's sampled and rejected tokens; both are 0 within a prompt."""
    count = len(of.idx_mapping)
    is_prompt = of.seq_lens[:count] < of.prefill_len[of.idx_mapping]
    of.num_sampled[:count].masked_fill_(is_prompt, 0)
    num_rejected = of.cu_num_logits[: count + 1].diff() - of.num_sampled[:count]
    of.num_rejected[:count] = num_rejected.masked_fill(is_prompt, 0)


def logits_stats(of: Launch) -> tuple[int, ...] | None:
    """Compute the blocks' maxima and sums of exponentials of each row that verifies a draft."""
    if of.HAS_DRAFT_LOGITS:
        return tuple(of.target_local_max.shape)
    steps = of.expanded_local_pos.tolist()
    for row, request in enumerate(of.expanded_idx_mapping.tolist()):
        if row + 1 == of.num_logits or steps[row + 1] == 0:
            continue
        logits = of.target_logits[row, : of.vocab_size].float().numpy()[None]
        maxima = of.target_local_max[row].numpy()
        tokens, values = block_argmax(logits, of.BLOCK_SIZE)
        maxima[:] = values[0]
        if of.temp[request] == 0:
            of.target_local_argmax.numpy()[row] = tokens[0]
            continue
        base = np.where(np.isneginf(maxima), _ZERO, maxima)[:, None]
        blocks = in_blocks(logits, of.BLOCK_SIZE, -np.inf)[0]
        of.target_local_sumexp.numpy()[row] = np.exp(blocks - base).sum(axis=-1)
    return None


def _log_sum(of: Launch, row: int) -> np.float32:
    """Return the log of a row's whole sum of exponentials, from its blocks' sums."""
    maxima, sums = of.target_local_max[row].numpy(), of.target_local_sumexp[row].numpy()
    largest = maxima.max()
    # As many as the kernel adds, the last ones empty: so they round alike.
    parts = np.zeros(of.PADDED_VOCAB_NUM_BLOCKS, np.float32)
    parts[: len(sums)] = sums * np.exp(maxima - largest)
    total: np.float32 = largest + np.log(parts.sum())
    return total


def rejection(of: Launch) -> tuple[int, ...] | None:
    """Write each request's accepted drafts and their number; a greedy one gets the next token
    too.
    """
    if of.HAS_DRAFT_LOGITS or of.USE_BLOCK_VERIFICATION or of.SYNTHETIC_MODE:
        return (len(of.idx_mapping),)
    bounds = of.cu_num_logits.tolist()
    for req, request in enumerate(of.idx_mapping.tolist()):
        is_greedy, seed = bool(of.temp[request] == 0), int(of.seed[request])
        accepted, log_sum = 0, _ZERO
        for step, row in enumerate(range(bounds[req], bounds[req + 1] - 1)):
            token = likeliest = int(of.draft_sampled[row + 1])
            if is_greedy:
                maxima = of.target_local_max[row].nan_to_num(nan=-np.inf, neginf=-np.inf)
                likeliest = int(of.target_local_argmax[row, int(maxima.argmax())])
                is_accepted = likeliest == token
            elif token < 0:
                break
            else:
                log_sum = _log_sum(of, row)
                uniform = _uniform(seed, int(of.pos[row]))
                is_accepted = _number(of.target_logits[row, token]) - log_sum > np.log(uniform)
            of.sampled[req, step] = likeliest
            if not is_accepted:
                break
            accepted += 1
        of.rejected_steps[req] = accepted
        of.target_rejected_logsumexp[req] = float(log_sum)
        of.draft_rejected_logsumexp[req] = 0.0
    return None


def resample(of: Launch) -> None:
    """Draw the token after each request's accepted drafts from the residual, block by block."""
    assert not of.WATERMARK, "refused when the platform is configured"
    bounds = of.cu_num_logits.tolist()
    for req, step in enumerate(of.rejected_step.tolist()):
        row = bounds[req] + step
        request = int(of.expanded_idx_mapping[row])
        is_bonus = row == bounds[req + 1] - 1
        if of.temp[request] == 0 and not is_bonus:
            continue
        logits = of.target_logits[row, : of.vocab_size].float().numpy()
        rejected = -1 if is_bonus else int(of.draft_sampled[row + 1])
        if rejected >= 0 and of.HAS_DRAFT_LOGITS:
            target = logits - _number(of.target_rejected_logsumexp[req])
            if of.USE_BLOCK_VERIFICATION and step > 0:
                target = target + _number(of.cumulative_log_p[row - 1])
            drawn_from = of.draft_logits[request, step, : of.vocab_size].float() / of.temp[request]
            drawn_from = drawn_from.numpy() - _number(of.draft_rejected_logsumexp[req])
            # Two zero probabilities make a NaN, which is not below 1; larger ratios are not kept.
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                ratio = np.exp(drawn_from - target)
                logits = np.where(ratio < 1, target + np.log1p(-ratio), np.float32(-np.inf))
        elif rejected >= 0:
            logits = logits.copy()
            logits[rejected] = -np.inf
        seeds, temperature = (each[request : request + 1].numpy() for each in (of.seed, of.temp))
        drawn = noised(logits[None], seeds, of.pos[row : row + 1].numpy(), temperature, of.USE_FP64)
        tokens, values = block_argmax(drawn, of.BLOCK_SIZE)
        of.resampled_local_argmax.numpy()[req] = tokens[0]
        of.resampled_local_max.numpy()[req] = values[0]


def insert_resampled(of: Launch) -> None:
    """Append the resampled token to each request's accepted drafts."""
    bounds = of.cu_num_logits.tolist()
    for req, accepted in enumerate(of.num_sampled.tolist()):
        row = bounds[req] + accepted
        of.num_sampled[req] = accepted + 1
        is_bonus = row == bounds[req + 1] - 1
        if of.temp[of.expanded_idx_mapping[row]] == 0 and not is_bonus:
            continue
        values = of.resampled_local_max[req].numpy()
        block = np.where(np.isnan(values), -np.inf, values).argmax()
        of.sampled[req, accepted] = of.resampled_local_argmax[req, block]


OVERRIDES: dict[str, Functions] = {
    _GPU + "input_batch._get_num_sampled_and_rejected_kernel": (num_sampled_and_rejected,),
    _GPU + "spec_decode.rejection_sampler._gather_draft_sampled_kernel": (gather_draft_sampled,),
    _VERIFY + "_compute_local_logits_stats_kernel": (logits_stats,),
    _VERIFY + "_rejection_kernel": (rejection,),
    _VERIFY + "_resample_kernel": (resample,),
    _VERIFY + "_insert_resampled_kernel": (insert_resampled,),
}
