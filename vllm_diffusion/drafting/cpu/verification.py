"""NumPy in place of the Triton kernels that verify drafts; see ``vllm_diffusion.cpu.sampling_kernels``.

FLy and watermarks are not supported; the platform refuses them when it is configured. Names of arguments,
constants among them, are those of vLLM's kernels.
"""

# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vllm_diffusion.cpu.launches import Functions
from vllm_diffusion.cpu.sampling_kernels import Floats, block_argmax, in_blocks, noised
from vllm_diffusion.drafting.cpu.verified_laws import ZERO, Draft, Joint, Target, draft_row, number

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


def gather_draft_sampled(
    draft_sampled: Tensor,
    pos: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
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
) -> None:
    """Count each request's sampled and rejected tokens; both are 0 within a prompt."""
    count = len(idx_mapping)
    is_prompt = seq_lens[:count] < prefill_len[idx_mapping]
    num_sampled[:count].masked_fill_(is_prompt, 0)
    num_logits = cu_num_logits[1 : count + 1] - cu_num_logits[:count]
    num_rejected[:count] = (num_logits - num_sampled[:count]).masked_fill(is_prompt, 0)


def _max_and_sumexp(row: Floats, block_size: int) -> tuple[Floats, Floats]:
    """Return each block's maximum, and its sum of exponentials relative to it, [num_blocks] each."""
    blocks = in_blocks(row[None], block_size, -np.inf)[0]
    largest = blocks.max(axis=-1)
    base = np.where(np.isneginf(largest), ZERO, largest)
    return largest, np.exp(blocks - base[:, None]).sum(axis=-1)


def logits_stats(
    target_local_argmax: Tensor,
    target_local_max: Tensor,
    target_local_sumexp: Tensor,
    draft_local_max: Tensor,
    draft_local_sumexp: Tensor,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Compute the blocks' maxima and sums of exponentials of each row that verifies a draft."""
    steps = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        if row + 1 == num_logits or steps[row + 1] == 0:
            continue
        logits = target_logits[row, :vocab_size].float().numpy()
        temperature = number(temp[request])
        if temperature == 0:
            tokens, values = block_argmax(logits[None], BLOCK_SIZE)
            target_local_argmax.numpy()[row] = tokens[0]
            target_local_max.numpy()[row] = values[0]
            continue
        largest, sumexp = _max_and_sumexp(logits, BLOCK_SIZE)
        target_local_max.numpy()[row], target_local_sumexp.numpy()[row] = largest, sumexp
        if draft_logits is not None:
            drawn_from = draft_row(draft_logits, request, steps[row], vocab_size, temperature)
            largest, sumexp = _max_and_sumexp(drawn_from, BLOCK_SIZE)
            draft_local_max.numpy()[row], draft_local_sumexp.numpy()[row] = largest, sumexp


def cumulative_log_p(
    cumulative_log_p: Tensor,
    target: Target,
    draft: Draft,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
) -> None:
    """Compute the log of the running joint ratio up to each draft (block verification)."""
    bounds = cu_num_logits.tolist()
    for req, request in enumerate(idx_mapping.tolist()):
        temperature = number(temp[request])
        if temperature == 0:
            continue
        log_p = ZERO
        for step, row in enumerate(range(bounds[req], bounds[req + 1] - 1)):
            token = draft.token(row)
            if token >= 0:
                ratio = target.log_prob(row, token)
                ratio = ratio - draft.log_prob(row, request, step, token, temperature)
                log_p = min(log_p + ratio, ZERO)
            cumulative_log_p[row] = float(log_p)


def residual_mass(
    local_residual_mass: Tensor,
    cumulative_log_p: Tensor,
    target: Target,
    draft: Draft,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    temp: Tensor,
    vocab_size: int,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Sum the target's probability that no draft covered, block by block (block verification)."""
    assert draft.draft_logits is not None
    steps = expanded_local_pos.tolist()
    for row, request in enumerate(expanded_idx_mapping.tolist()):
        step, temperature = steps[row], number(temp[request])
        is_last = row + 1 == num_logits or steps[row + 1] == 0
        if step == 0 or is_last or temperature == 0 or draft.token(row) < 0:
            continue
        logits = target.target_logits[row, :vocab_size].float().numpy() - target.log_sum(row)
        drawn_from = draft_row(draft.draft_logits, request, step, vocab_size, temperature)
        drawn_from = drawn_from - draft.log_sum(row)
        joint = np.exp(number(cumulative_log_p[row - 1]))
        left = np.maximum(joint * np.exp(logits) - np.exp(drawn_from), ZERO)
        sums = in_blocks(left[None], BLOCK_SIZE, 0.0)[0].sum(axis=-1)
        local_residual_mass.numpy()[row] = sums


@dataclass(frozen=True)
class Verified:
    """Verdicts of verification, by request.

    Attributes:
        sampled: [num_reqs, num_steps + 1], the accepted drafts; of a greedy request the next token too.
        rejected_steps: [num_reqs], the number of accepted drafts.
        target_rejected_logsumexp: [num_reqs], log of the target's sum at the first draft that was not accepted.
        draft_rejected_logsumexp: [num_reqs], the draft's.
    """

    sampled: Tensor
    rejected_steps: Tensor
    target_rejected_logsumexp: Tensor
    draft_rejected_logsumexp: Tensor


def rejection(
    verified: Verified,
    target: Target,
    draft: Draft,
    joint: Joint,
    target_local_argmax: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    synthetic_conditional_rates: Tensor | None,
    USE_BLOCK_VERIFICATION: bool,
    FLY_WINDOW_SIZE: int,
) -> None:
    """Write each request's accepted drafts and their number; a greedy one gets the next token too."""
    assert FLY_WINDOW_SIZE == 0, "refused when the platform is configured"
    bounds = cu_num_logits.tolist()
    for req, request in enumerate(idx_mapping.tolist()):
        first, num_drafts = bounds[req], bounds[req + 1] - bounds[req] - 1
        temperature, key = number(temp[request]), int(seed[request])
        is_greedy = temperature == 0
        accepted, last_row = 0, -1
        for step in range(num_drafts):
            row = first + step
            token = draft.token(row)
            is_valid, token = token >= 0, max(token, 0)
            if not is_greedy and not is_valid:
                break
            step_key = key ^ (step << 32) if USE_BLOCK_VERIFICATION else key
            u = _uniform(step_key, int(pos[row]))
            if USE_BLOCK_VERIFICATION and not is_greedy:
                following = draft.token(row + 1) if step < num_drafts - 1 else -1
                if u <= joint.threshold(row, following, target):
                    accepted = step + 1
                verified.sampled[req, step] = token
                continue
            last_row = row
            if is_greedy:
                maxima = target.target_local_max[row]
                best = int(maxima.nan_to_num(nan=-np.inf, neginf=-np.inf).argmax())
                said = int(target_local_argmax[row, best])
                is_accepted = said == token
            else:
                said = token
                drawn = draft.log_prob(row, request, step, token, temperature)
                is_accepted = bool(target.log_prob(row, token) > np.log(u) + drawn)
            if synthetic_conditional_rates is not None:
                is_accepted = bool(u < number(synthetic_conditional_rates[step]))
            is_accepted &= is_valid
            verified.sampled[req, step] = token if is_accepted else said
            if not is_accepted:
                break
            accepted += 1
        verified.rejected_steps[req] = accepted
        if USE_BLOCK_VERIFICATION and accepted < num_drafts:
            last_row = first + accepted
        needs_sums = last_row >= 0 and not is_greedy
        sums = (target.log_sum(last_row), draft.log_sum(last_row)) if needs_sums else (0.0, 0.0)
        verified.target_rejected_logsumexp[req] = float(sums[0])
        verified.draft_rejected_logsumexp[req] = float(sums[1])


def resample(
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    target_logits: Tensor,
    target_rejected_logsumexp: Tensor,
    draft_logits: Tensor | None,
    draft_rejected_logsumexp: Tensor,
    rejected_step: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    draft_sampled: Tensor,
    temp: Tensor,
    seed: Tensor,
    pos: Tensor,
    cumulative_log_p: Tensor | None,
    vocab_size: int,
    BLOCK_SIZE: int,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    WATERMARK: bool,
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
            target = logits - number(target_rejected_logsumexp[req])
            if USE_BLOCK_VERIFICATION and step > 0:
                assert cumulative_log_p is not None
                target = target + number(cumulative_log_p[row - 1])
            drawn_from = draft_row(draft_logits, request, step, vocab_size, temperature[0])
            drawn_from = drawn_from - number(draft_rejected_logsumexp[req])
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
    num_sampled: Tensor,
    resampled_local_argmax: Tensor,
    resampled_local_max: Tensor,
    cu_num_logits: Tensor,
    expanded_idx_mapping: Tensor,
    temp: Tensor,
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


OVERRIDES: dict[str, Functions] = {
    "vllm.v1.worker.gpu.input_batch._get_num_sampled_and_rejected_kernel": (
        num_sampled_and_rejected,
    ),
    _SPEC_DECODE + "rejection_sampler._gather_draft_sampled_kernel": (gather_draft_sampled,),
    _VERIFY + "_compute_local_logits_stats_kernel": (logits_stats,),
    _VERIFY + "_compute_cumulative_log_p_kernel": (cumulative_log_p,),
    _VERIFY + "_compute_local_residual_mass_kernel": (residual_mass,),
    _VERIFY + "_rejection_kernel": (rejection,),
    _VERIFY + "_resample_kernel": (resample,),
    _VERIFY + "_insert_resampled_kernel": (insert_resampled,),
}
