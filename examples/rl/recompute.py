"""Log-probabilities of an answer's tokens as a trainer computes them, from a request's trace.

A server answers a request that asks for ``diffusion_trace`` with a list of canvases, each a list of
rows of token ids: what every denoising step began from, and last what the canvas ended as. With the
prompt that is all a trainer needs; what is computed here is differentiable, and equals what the
server reports as ``logprobs`` of the same weights, up to rounding (docs/operate/new-weights.md).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoints"))

from tiny_sdar import BLOCK_LENGTH, MASK_ID, hidden_states

# Of a canvas, and of an answer.
Trace = list[list[list[int]]]


@dataclass(frozen=True)
class Drawn:
    """Tokens that were drawn in some answers, in no particular order.

    Attributes:
        logprob: [num_tokens], of each in the step that decided it.
        answer: [num_tokens], int64, which answer it is of.
        place: [num_tokens], int64, where in the answer it stands; what stands behind the end is
            drawn too, and no part of the answer.
    """

    logprob: Tensor
    answer: Tensor
    place: Tensor


def sdar_logprobs(
    model: Qwen3ForCausalLM,
    prompts: list[list[int]],
    traces: list[Trace],
    temperature: float = 1.0,
) -> Drawn:
    """Of a masked family with blocks: one pass for all steps of all canvases.

    Each answer goes through the model clean, with a copy of a block for each step that was taken in
    it: a copy sees itself and the clean blocks before it.

    Args:
        model: Of ``tiny_sdar.build_model``.
        prompts: Token ids.
        traces: Of an answer to each.
        temperature: Of the requests; 1 where they were greedy.
    """
    C = BLOCK_LENGTH
    rows: list[tuple[list[int], list[int], list[int]]] = []
    aims: list[tuple[int, int, int, int, int]] = []
    for index, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        start = len(prompt) // C * C
        clean = prompt[:start] + [token for canvas in trace for token in canvas[-1]]
        ids, position, copy = list(clean), list(range(len(clean))), [0] * len(clean)
        for block, canvas in enumerate(trace):
            first = start + block * C
            for before, after in zip(canvas, canvas[1:], strict=False):
                for j, (was, became) in enumerate(zip(before, after, strict=True)):
                    if was != became:
                        aims.append((index, len(ids) + j, became, index, first + j - len(prompt)))
                ids += before
                position += range(first, first + C)
                copy += [copy[-1] + 1] * C
        rows.append((ids, position, copy))
    length = max(len(ids) for ids, _, _ in rows)
    # Padding is a copy of its own, which sees itself.
    ids, position, copy = (
        torch.tensor([row[part] + [fill] * (length - len(row[part])) for row in rows])
        for part, fill in ((0, MASK_ID), (1, 0), (2, -1))
    )
    block = position // C
    itself = (copy[:, :, None] == copy[:, None]) & (block[:, :, None] == block[:, None])
    earlier = (copy[:, None] == 0) & (block[:, None] < block[:, :, None]) & (copy[:, :, None] >= 0)
    row, column, token, answer, place = torch.tensor(aims).unbind(1)
    hidden = hidden_states(model, ids, position, itself | earlier)
    logits = model.lm_head(hidden[row, column]).float() / temperature
    # It is never drawn.
    never = torch.zeros(logits.shape[-1], dtype=torch.bool)
    never[MASK_ID] = True
    logprobs = logits.masked_fill(never, float("-inf")).log_softmax(-1)
    return Drawn(logprobs.gather(-1, token[:, None])[:, 0], answer, place)


def diffusion_gemma_logprobs(
    model: DiffusionGemmaForBlockDiffusion,
    prompt: list[int],
    trace: Trace,
    step_map: list[int],
    *,
    max_steps: int,
    t_min: float,
    t_max: float,
) -> Tensor:
    """[len(step_map)]: of one answer of DiffusionGemma, each token in the step that decided it.

    A step is conditioned on what the one before it found, so a canvas's steps are run in order.

    Args:
        model: Of transformers.
        prompt: Token ids.
        trace: Of the answer.
        step_map: Of the answer, ``diffusion_step_map``.
        max_steps: The request's step cap N, over which the temperature falls.
        t_min: What the temperature falls to.
        t_max: The temperature at the first step.
    """
    known = list(prompt)
    found: list[Tensor] = []
    for canvas in trace:
        result = torch.tensor(canvas[-1])
        signal, of_step = None, []
        for step, began_from in enumerate(canvas[:-1]):
            logits = model(
                input_ids=torch.tensor([known]),
                decoder_input_ids=torch.tensor([began_from]),
                self_conditioning_logits=signal,
            ).logits
            scaled = logits / (t_min + (t_max - t_min) * (max_steps - step) / max_steps)
            of_step.append(scaled[0].log_softmax(-1).gather(-1, result[:, None])[:, 0])
            # No gradient flows from a step to the one before it.
            signal = scaled.detach()
        # A token's step counts from 1.
        steps = step_map[len(known) - len(prompt) :][: len(result)]
        found += [of_step[step - 1][j] for j, step in enumerate(steps)]
        known += canvas[-1]
    return torch.stack(found)
