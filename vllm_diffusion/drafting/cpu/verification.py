"""NumPy in place of the Triton kernels that verify drafts; see ``vllm_diffusion.cpu.sampling_kernels``.

FLy and watermarks are not supported; the platform refuses them when it is configured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from vllm_diffusion.cpu.sampling_kernels import Floats, block_argmax, in_blocks, noised

_SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode."
_VERIFY = _SPEC_DECODE + "rejection_sampler_utils."

_LEAST_UNIFORM = np.float32(4.6566127342e-10)


def _uniform(seed: int, offset: int) -> np.float32:
    """Return what Triton's ``tl.rand`` gives, without its zero: Philox of ten rounds."""
    c0, c1, c2, c3 = offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    # The complement of what is negative as a signed integer.
    positive = c0 ^ 0xFFFFFFFF if c0 >> 31 else c0
    return max(np.float32(positive) * _LEAST_UNIFORM, _LEAST_UNIFORM)


def _number(element: Tensor) -> np.float32:
    return np.float32(element.item())


def gather_draft_sampled(
    draft_sampled: Tensor,
    pos: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
    num_logits: int,
    **_: Any,
) -> None:
    """Gather token and position of each sampled row; placeholders of drafts in a prompt give -1."""
    where = positions[logits_indices]
    is_placeholder = (expanded_local_pos > 0) & (
        where - expanded_local_pos < prefill_len[expanded_idx_mapping]
    )
    draft_sampled[:] = input_ids[logits_indices].masked_fill(is_placeholder, -1)
    pos[:] = where


def num_sampled_and_rejected(
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
    **_: Any,
) -> None:
    """Count each request's sampled and rejected tokens; both are 0 within a prompt."""
    count = len(idx_mapping)
    is_prompt = seq_lens[:count] < prefill_len[idx_mapping]
    num_sampled[:count].masked_fill_(is_prompt, 0)
    num_logits = cu_num_logits[1 : count + 1] - cu_num_logits[:count]
    num_rejected[:count] = (num_logits - num_sampled[:count]).masked_fill(is_prompt, 0)


def _draft_row(
    draft_logits: Tensor, request: int, step: int, vocab_size: int, temp: np.float32
) -> Floats:
    """Return the logits that a draft was drawn from, [vocab_size], divided by the temperature."""
    row: Floats = draft_logits[request, step, :vocab_size].float().numpy()
    return row / temp


def _max_and_sumexp(row: Floats, block_size: int) -> tuple[Floats, Floats]:
    """Return each block's maximum, and its sum of exponentials relative to it, [num_blocks] each."""
    blocks = in_blocks(row[None], block_size, -np.inf)[0]
    largest = blocks.max(axis=-1)
    base = np.where(np.isneginf(largest), np.float32(0), largest)
    return largest, np.exp(blocks - base[:, None]).sum(axis=-1)


def logits_stats(
    target_local_argmax: Tensor,
    target_local_argmax_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    target_logits: Tensor,
    target_logits_stride: int,
    draft_logits: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_logits: int,
    *,
    BLOCK_SIZE: int,  # noqa: N803
    **_: Any,
) -> None:
    """Compute the blocks' maxima and sums of exponentials of each row that verifies a draft."""
    steps = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        if row + 1 == num_logits or steps[row + 1] == 0:
            continue
        logits = target_logits[row, :vocab_size].float().numpy()
        temperature = _number(temp[request])
        if temperature == 0:
            tokens, values = block_argmax(logits[None], BLOCK_SIZE)
            target_local_argmax.numpy()[row] = tokens[0]
            target_local_max.numpy()[row] = values[0]
            continue
        largest, sumexp = _max_and_sumexp(logits, BLOCK_SIZE)
        target_local_max.numpy()[row], target_local_sumexp.numpy()[row] = largest, sumexp
        if draft_logits is not None:
            drawn_from = _draft_row(draft_logits, request, steps[row], vocab_size, temperature)
            largest, sumexp = _max_and_sumexp(drawn_from, BLOCK_SIZE)
            draft_local_max.numpy()[row], draft_local_sumexp.numpy()[row] = largest, sumexp


def _log_sum(local_max: Tensor, local_sumexp: Tensor, row: int, padded: int) -> np.float32:
    """Return the log of a row's whole sum of exponentials, from its blocks' sums."""
    maxima, sums = local_max[row].numpy(), local_sumexp[row].numpy()
    largest = maxima.max()
    parts = np.zeros(padded, np.float32)
    parts[: len(sums)] = sums * np.exp(maxima - largest)
    total: np.float32 = largest + np.log(parts.sum())
    return total


def cumulative_log_p(
    cumulative: Tensor,
    target_logits: Tensor,
    target_logits_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    vocab_num_blocks: int,
    *,
    PADDED_VOCAB_NUM_BLOCKS: int,  # noqa: N803
    **_: Any,
) -> None:
    """Compute the log of the running joint ratio up to each draft (block verification)."""
    bounds = cu_num_logits.tolist()
    padded = PADDED_VOCAB_NUM_BLOCKS
    for req, request in enumerate(idx_mapping.tolist()):
        temperature = _number(temp[request])
        if temperature == 0:
            continue
        log_p = np.float32(0)
        for step, row in enumerate(range(bounds[req], bounds[req + 1] - 1)):
            token = int(draft_sampled[row + 1])
            if token >= 0:
                ratio = _number(target_logits[row, token]) - _log_sum(
                    target_local_max, target_local_sumexp, row, padded
                )
                if draft_logits is not None:
                    drawn = _number(draft_logits[request, step, token]) / temperature
                    ratio = ratio - (
                        drawn - _log_sum(draft_local_max, draft_local_sumexp, row, padded)
                    )
                log_p = min(log_p + ratio, np.float32(0))
            cumulative[row] = float(log_p)


def residual_mass(
    local_residual_mass: Tensor,
    local_residual_mass_stride: int,
    cumulative: Tensor,
    target_logits: Tensor,
    target_logits_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_logits: Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_logits: int,
    vocab_num_blocks: int,
    *,
    BLOCK_SIZE: int,  # noqa: N803
    PADDED_VOCAB_NUM_BLOCKS: int,  # noqa: N803
    **_: Any,
) -> None:
    """Sum the target's probability that no draft covered, block by block (block verification)."""
    steps = expanded_local_pos.tolist()
    padded = PADDED_VOCAB_NUM_BLOCKS
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        step, temperature = steps[row], _number(temp[request])
        is_last = row + 1 == num_logits or steps[row + 1] == 0
        if step == 0 or is_last or temperature == 0 or int(draft_sampled[row + 1]) < 0:
            continue
        target = target_logits[row, :vocab_size].float().numpy()
        target = target - _log_sum(target_local_max, target_local_sumexp, row, padded)
        drawn_from = _draft_row(draft_logits, request, step, vocab_size, temperature)
        drawn_from = drawn_from - _log_sum(draft_local_max, draft_local_sumexp, row, padded)
        joint = np.exp(_number(cumulative[row - 1]))
        left = np.maximum(joint * np.exp(target) - np.exp(drawn_from), np.float32(0))
        sums = in_blocks(left[None], BLOCK_SIZE, 0.0)[0].sum(axis=-1)
        local_residual_mass.numpy()[row] = sums


def rejection(
    sampled: Tensor,
    sampled_stride: int,
    rejected_steps: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_rejected_logsumexp: Tensor,
    target_logits: Tensor,
    target_logits_stride: int,
    target_local_argmax: Tensor,
    target_local_argmax_stride: int,
    target_local_max: Tensor,
    target_local_max_stride: int,
    target_local_sumexp: Tensor,
    target_local_sumexp_stride: int,
    draft_sampled: Tensor,
    draft_logits: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp: Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    synthetic_conditional_rates: Tensor | None,
    cumulative: Tensor | None,
    local_residual_mass: Tensor | None,
    local_residual_mass_stride: int,
    fly_entropy: Tensor | None,
    fly_entropy_threshold: float,
    vocab_num_blocks: int,
    *,
    PADDED_VOCAB_NUM_BLOCKS: int,  # noqa: N803
    USE_BLOCK_VERIFICATION: bool,  # noqa: N803
    FLY_WINDOW_SIZE: int,  # noqa: N803
    **_: Any,
) -> None:
    """Write each request's accepted drafts and their number; a greedy one gets the next token too."""
    assert FLY_WINDOW_SIZE == 0, "refused when the platform is configured"
    bounds = cu_num_logits.tolist()
    padded = PADDED_VOCAB_NUM_BLOCKS
    one = np.float32(1)

    def target_lse(row: int) -> np.float32:
        return _log_sum(target_local_max, target_local_sumexp, row, padded)

    def draft_lse(row: int) -> np.float32:
        if draft_logits is None:
            return np.float32(0)
        return _log_sum(draft_local_max, draft_local_sumexp, row, padded)

    def target_log_prob(row: int, token: int) -> np.float32:
        return _number(target_logits[row, token]) - target_lse(row)

    def draft_log_prob(row: int, request: int, step: int, token: int) -> np.float32:
        if draft_logits is None:
            return np.float32(0)
        drawn = _number(draft_logits[request, step, token]) / _number(temp[request])
        return drawn - draft_lse(row)

    def threshold(row: int, is_followed: bool) -> np.float32:
        """Return the bound below which a uniform number accepts all drafts up to this one."""
        assert cumulative is not None
        joint = np.exp(_number(cumulative[row]))
        following = int(draft_sampled[row + 2]) if is_followed else -1
        if following < 0:
            return joint
        if local_residual_mass is not None:
            parts = np.zeros(padded, np.float32)
            parts[:vocab_num_blocks] = local_residual_mass[row + 1].numpy()
            mass = parts.sum()
        else:
            mass = joint * (one - np.exp(target_log_prob(row + 1, following)))
        whole = mass + one - joint
        return mass / whole if whole > 0 else one

    for req, request in enumerate(idx_mapping.tolist()):
        first, num_drafts = bounds[req], bounds[req + 1] - bounds[req] - 1
        is_greedy = float(temp[request]) == 0
        key = int(seed[request])
        accepted, last_row = 0, -1
        for step in range(num_drafts):
            row = first + step
            token = int(draft_sampled[row + 1])
            is_valid, token = token >= 0, max(token, 0)
            if not is_greedy and not is_valid:
                break
            step_key = key ^ (step << 32) if USE_BLOCK_VERIFICATION else key
            u = _uniform(step_key, int(pos[row]))
            if USE_BLOCK_VERIFICATION and not is_greedy:
                if u <= threshold(row, step < num_drafts - 1):
                    accepted = step + 1
                sampled[req, step] = token
                continue
            last_row = row
            if is_greedy:
                best = int(target_local_max[row].nan_to_num(nan=-np.inf, neginf=-np.inf).argmax())
                said = int(target_local_argmax[row, best])
                is_accepted = said == token
            else:
                said = token
                is_accepted = bool(
                    target_log_prob(row, token)
                    > np.log(u) + draft_log_prob(row, request, step, token)
                )
            if synthetic_conditional_rates is not None:
                is_accepted = bool(u < _number(synthetic_conditional_rates[step]))
            is_accepted &= is_valid
            sampled[req, step] = token if is_accepted else said
            if not is_accepted:
                break
            accepted += 1
        rejected_steps[req] = accepted
        if USE_BLOCK_VERIFICATION and accepted < num_drafts:
            last_row = first + accepted
        needs_sums = last_row >= 0 and not is_greedy
        target_rejected_logsumexp[req] = float(target_lse(last_row)) if needs_sums else 0.0
        draft_rejected_logsumexp[req] = float(draft_lse(last_row)) if needs_sums else 0.0


def resample(
    resampled_local_argmax: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: Tensor,
    resampled_local_max_stride: int,
    target_logits: Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp: Tensor,
    draft_logits: Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: Tensor,
    rejected_step: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    draft_sampled: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    cumulative: Tensor | None,
    contexts: Tensor | None,
    contexts_stride: int,
    watermarking: Tensor | None,
    watermarking_skip_mask: Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,  # noqa: N803
    USE_FP64: bool,  # noqa: N803
    USE_BLOCK_VERIFICATION: bool,  # noqa: N803
    WATERMARK: bool,  # noqa: N803
    **_: Any,
) -> None:
    """Draw the token behind each request's accepted drafts from the residual, block by block."""
    assert not WATERMARK, "refused when the platform is configured"
    bounds = cu_num_logits.tolist()
    for req, step in enumerate(rejected_step.tolist()):
        row = bounds[req] + step
        request = int(expanded_idx_mapping[row])
        temperature = temp[request : request + 1].float().numpy()
        is_bonus = row == bounds[req + 1] - 1
        if temperature[0] == 0 and not is_bonus:
            continue
        logits = target_logits[row, :vocab_size].float().numpy()
        rejected = -1 if is_bonus else int(draft_sampled[row + 1])
        if rejected >= 0 and draft_logits is not None:
            target = logits - _number(target_rejected_logsumexp[req])
            if USE_BLOCK_VERIFICATION and step > 0:
                assert cumulative is not None
                target = target + _number(cumulative[row - 1])
            drawn_from = _draft_row(draft_logits, request, step, vocab_size, temperature[0])
            drawn_from = drawn_from - _number(draft_rejected_logsumexp[req])
            # Two zero probabilities make a NaN, which is not below 1; larger ratios are not kept.
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                ratio = np.exp(drawn_from - target)
                logits = np.where(ratio < 1, target + np.log1p(-ratio), np.float32(-np.inf))
        elif rejected >= 0:
            logits = logits.copy()
            logits[rejected] = -np.inf
        seeds = seed[request : request + 1].numpy()
        where = pos[row : row + 1].numpy()
        drawn = noised(logits[None], seeds, where, temperature, USE_FP64)
        tokens, values = block_argmax(drawn, BLOCK_SIZE)
        resampled_local_argmax.numpy()[req] = tokens[0]
        resampled_local_max.numpy()[req] = values[0]


def insert_resampled(
    sampled: Tensor,
    sampled_stride: int,
    num_sampled: Tensor,
    resampled_local_argmax: Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max: Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    temp: Tensor,
    **_: Any,
) -> None:
    """Append the resampled token to each request's accepted drafts."""
    bounds = cu_num_logits.tolist()
    for req, accepted in enumerate(num_sampled.tolist()):
        row = bounds[req] + accepted
        num_sampled[req] = accepted + 1
        is_bonus = row == bounds[req + 1] - 1
        if float(temp[int(expanded_idx_mapping[row])]) == 0 and not is_bonus:
            continue
        values = resampled_local_max[req].numpy()
        block = np.where(np.isnan(values), -np.inf, values).argmax()
        sampled[req, accepted] = resampled_local_argmax[req, block]


OVERRIDES: dict[str, Callable[..., None]] = {
    "vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel": num_sampled_and_rejected,
    _SPEC_DECODE + "rejection_sampler._gather_draft_sampled_kernel": gather_draft_sampled,
    _VERIFY + "_compute_local_logits_stats_kernel": logits_stats,
    _VERIFY + "_compute_cumulative_log_p_kernel": cumulative_log_p,
    _VERIFY + "_compute_local_residual_mass_kernel": residual_mass,
    _VERIFY + "_rejection_kernel": rejection,
    _VERIFY + "_resample_kernel": resample,
    _VERIFY + "_insert_resampled_kernel": insert_resampled,
}
