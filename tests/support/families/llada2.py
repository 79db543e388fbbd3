"""LLaDA2.0, 2.1 and 2.2: three rules over one block-causal model.

Sources: inclusionAI's ``modeling_llada2_moe.py`` of LLaDA2.0 and 2.1 as found in public copies,
which agree on the loops. LLaDA2.2's file was not found: its loop is from FluxServe's description of
``_joint_decode_block`` and its ``decoders/levenshtein.py`` at 5dcf8a8, whose tests bind the
publisher's function.

All of them recompute whole sequences in the publisher's code. ``commit`` passes in the records are
those that a KV cache takes: a finished block is forwarded once more before the next one starts,
except where its last pass already ran on its final tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.support.families.run import (
    Draws,
    Model,
    Pass,
    Run,
    Sample,
    begin,
    block_causal,
    block_draws,
    cut,
    denoise,
    draw,
    even_schedule,
    most_confident,
    multinomial,
    probability,
)


@torch.no_grad()
def generate_2_0(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    block_length: int = 32,
    steps: int = 32,
    gen_length: int = 2048,
    top_p: float = 1.0,
    top_k: int = 0,
    threshold: float = 0.95,
    eos_id: int = 156892,
    mask_id: int = 156895,
    sample: Sample = multinomial,
) -> Run:
    """Reveal what is above the threshold, at least the schedule's number a step.

    A finished block that holds an end token ends the generation. The result ends with the first end
    token, or after ``gen_length`` tokens.

    Differs from the publisher's:

    - Temperature 0 takes the most likely token at its plain probability. There it draws from the
      unscaled distribution, filtered by ``top_k`` and ``top_p``.
    - ``eos_early_stop`` and ``minimal_topk`` are left out.
    - Among equally confident positions the leftmost is taken first.
    """
    steps = min(steps, gen_length)
    prompt_length = len(prompt_ids)
    run, x, revealed, starts = begin(prompt_ids, gen_length, block_length, mask_id)
    schedule = even_schedule(block_length, steps)

    def choose(logits: Tensor, masked: Tensor, count: int, draws: Draws) -> tuple[Tensor, Tensor]:
        tokens, p = draw(logits, temperature, top_k, top_p, sample, draws)
        reveal = masked & (p > threshold)
        if int(reveal.sum()) < count:
            reveal = most_confident(p, masked, count)
        return tokens, reveal

    for canvas, start in enumerate(starts):
        end = start + block_length
        if canvas > 0:
            run.passes.append(Pass("commit", start - block_length, 0))
        visible, rows = block_causal(end, block_length), slice(start, end)
        denoise(
            run, model, mask_id, choose, x[:end], visible, rows, revealed[rows], schedule, canvas
        )
        if (x[prompt_length:end] == eos_id).any():
            break
    run.tokens = cut(x[prompt_length:end].tolist()[:gen_length], [eos_id])
    run.revealed = revealed[prompt_length:].tolist()[: len(run.tokens)]
    return run


@torch.no_grad()
def generate_2_1(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    block_length: int = 32,
    gen_length: int = 2048,
    top_p: float = 1.0,
    top_k: int = 0,
    threshold: float = 0.95,
    editing_threshold: float = 0.9,
    max_post_steps: int = 16,
    eos_id: int = 156892,
    mask_id: int = 156895,
    sample: Sample = multinomial,
) -> Run:
    """As 2.0, and every step also rewrites decided tokens.

    A token of the block that is not the prompt's is rewritten where the step's token is another and
    its probability is above ``editing_threshold``: one of 0 rewrites whatever differs. A block ends
    with a step that found no mask and changed nothing; that step ran on the final tokens, so its KV
    is final. It also ends when ``max_post_steps`` steps found no mask, whatever they changed. A
    finished block with an end token ends the generation (``eos_early_stop``).

    The publisher's ``steps`` and ``minimal_topk`` decide nothing in this loop and are left out. A
    decided token may become a mask again, if a mask is the step's token; nothing forbids it.

    Differs from the publisher's: temperature 0 takes the most likely token in every copy; among
    equally confident positions the leftmost is taken first.
    """
    prompt_length = len(prompt_ids)
    run, x, revealed, starts = begin(prompt_ids, gen_length, block_length, mask_id)
    for canvas, start in enumerate(starts):
        end = start + block_length
        visible = block_causal(end, block_length)
        current = x[start:end]
        in_prompt = torch.arange(start, end) < prompt_length
        post_steps = 0
        step = 0
        final_kv = False
        while True:
            masked = current == mask_id
            post_steps += not masked.any()
            if post_steps > max_post_steps:
                break
            run.passes.append(Pass("denoise", start, int(masked.sum())))
            logits = model(x[:end], visible)[start:end]
            draws = block_draws(canvas, step, range(block_length))
            tokens, p = draw(logits, temperature, top_k, top_p, sample, draws)
            reveal = masked & (p > threshold)
            if not reveal.any():
                reveal = most_confident(p, masked, 1)
            edit = ~masked & ~in_prompt & (p > editing_threshold) & (tokens != current)
            write = reveal | edit
            current[write] = tokens[write]
            revealed[start:end][write] = step
            run.rewritten += int(edit.sum())
            step += 1
            if not masked.any() and not edit.any():
                final_kv = True
                break
        if (x[prompt_length:end] == eos_id).any():
            break
        if not final_kv and end < len(x):
            run.passes.append(Pass("commit", start, 0))
    run.tokens = cut(x[prompt_length:end].tolist()[:gen_length], [eos_id])
    run.revealed = revealed[prompt_length:].tolist()[: len(run.tokens)]
    return run


def apply_edits(
    written: Sequence[int],
    before: Sequence[int],
    original: Sequence[bool],
    prompt: int,
    *,
    mask_id: int,
    delete_token_id: int,
    split_token_id: int,
) -> tuple[list[int], list[bool]]:
    """Delete and split within one block, from left to right.

    DELETE drops its position, what follows moves left, and masks fill up on the right. SPLIT
    becomes a mask and after it the token that stood there before the step; what falls off on the
    right is lost. The first ``prompt`` positions are the prompt's, whatever they hold.

    Args:
        written: The block as the step wrote it.
        before: The block before the step.
        original: Which positions were masks when the block began; moves along with them.
        prompt: Leading positions that are the prompt's.
        mask_id: Fills up.
        delete_token_id: DELETE.
        split_token_id: SPLIT.

    Returns:
        The new block, and which of its positions were masks when the block began.
    """
    tokens: list[int] = []
    marks: list[bool] = []
    for i, token in enumerate(written):
        if i >= prompt and token == delete_token_id:
            continue
        if i >= prompt and token == split_token_id:
            tokens += [mask_id, before[i]]
            marks += [False, original[i]]
        else:
            tokens.append(token)
            marks.append(original[i])
    missing = max(len(written) - len(tokens), 0)
    tokens += [mask_id] * missing
    marks += [False] * missing
    return tokens[: len(written)], marks[: len(written)]


@torch.no_grad()
def generate_2_2(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    block_length: int = 32,
    steps: int = 32,
    gen_length: int = 2048,
    top_p: float = 1.0,
    top_k: int = 0,
    threshold: float = 0.5,
    editing_threshold: float = 0.0,
    max_post_steps: int = 16,
    max_steps_per_block: int = 1000,
    eos_ids: Sequence[int] = (156892, 156900),
    mask_id: int = 156895,
    delete_token_id: int = 156930,
    split_token_id: int = 156931,
    sample: Sample = multinomial,
) -> Run:
    """As 2.1, and a step may also delete a position or put a mask before one.

    - A step must reveal as many masks as its share of the block's first masks, plus all masks that
      edits made; with fewer above the threshold it reveals that many most confident ones. After
      ``steps`` steps it reveals all.
    - A step whose result, before edits are applied, was seen in this block before draws a changed
      position again without the token it has, five times at most.
    - A round in which none of the block's first masks is left counts as a post step; one that finds
      such a mask sets the count to 0. The ``max_post_steps``-th is the final round: it reveals
      every mask, and neither deletes nor splits. With ``max_post_steps=0`` the final round is the
      one that reveals the last of the block's first masks.
    - A block ends with a step that found no mask and changed nothing (its KV is final), or after
      the final round.

    Differs from the publisher's:

    - Above temperature 0 tokens are drawn for masks, and judged by their probability in the plain
      softmax, as there; but with ``top_k`` or ``top_p`` by that in what these keep, and what
      replaces a token that was drawn again or forbidden is the most likely one.
    - The position that is drawn again is the changed one of lowest confidence, the leftmost of
      equals; there it is a random one.
    - ``max_steps_per_block`` makes its last step a final round; there it warns and leaves masks.
    - DELETE and SPLIT in the prompt are left alone; there they are applied with a warning.
    - Among equally confident positions the leftmost is taken first.
    - When generation ends at an end token was not seen in the file; it is 2.1's rule here, with
      both ids of ``generation_config.json``.
    """
    ids = {
        "mask_id": mask_id,
        "delete_token_id": delete_token_id,
        "split_token_id": split_token_id,
    }
    prompt_length = len(prompt_ids)
    run, x, revealed, starts = begin(prompt_ids, gen_length, block_length, mask_id)
    for canvas, start in enumerate(starts):
        end = start + block_length
        visible = block_causal(end, block_length)
        in_prompt = torch.arange(start, end) < prompt_length
        original = ~in_prompt
        schedule = even_schedule(int(original.sum()), steps)
        seen: set[tuple[int, ...]] = set()
        post_steps = 0
        final_kv = False
        for step in range(max_steps_per_block):
            before = x[start:end].clone()
            masked = (before == mask_id) & ~in_prompt
            first_masks = masked & original
            post_steps = 0 if first_masks.any() else post_steps + 1
            if post_steps > max_post_steps and not masked.any():
                break
            run.passes.append(Pass("denoise", start, int(masked.sum())))
            logits = model(x[:end], visible)[start:end]
            p, tokens = logits.softmax(-1).max(-1)
            if temperature > 0:
                draws = block_draws(canvas, step, range(block_length))
                drawn, share = draw(logits, temperature, top_k, top_p, sample, draws)
                if top_k == 0 and top_p == 1.0:
                    share = probability(logits, drawn)
                tokens, p = torch.where(masked, drawn, tokens), torch.where(masked, share, p)

            if step < steps:
                needed = schedule[step] + int((masked & ~original).sum())
                reveal = masked & (p > threshold)
                if int(reveal.sum()) < needed:
                    reveal = most_confident(p, masked, needed)
            else:
                reveal = masked
            edit = ~masked & ~in_prompt & (p > editing_threshold) & (tokens != before)
            if max_post_steps > 0:
                final_round = post_steps >= max_post_steps
            else:
                final_round = bool(first_masks.any()) and not (first_masks & ~reveal).any()
            final_round |= step == max_steps_per_block - 1
            if final_round:
                reveal = masked
                plain = logits.clone()
                plain[:, [delete_token_id, split_token_id]] = float("-inf")
                forbidden = (tokens == delete_token_id) | (tokens == split_token_id)
                tokens = torch.where(forbidden, plain.argmax(-1), tokens)
            write = reveal | edit
            after = torch.where(write, tokens, before)

            tries = 0 if final_round else 5
            while tries and tuple(after.tolist()) in seen and (after != before).any():
                row = int(p.masked_fill(before == after, float("inf")).argmin())
                others = logits[row].clone()
                others[after[row]] = float("-inf")
                after[row] = others.argmax()
                tries -= 1
            seen.add(tuple(after.tolist()))

            run.rewritten += int((edit & (after != before)).sum())
            new, marks = apply_edits(
                after.tolist(), before.tolist(), original.tolist(), int(in_prompt.sum()), **ids
            )
            x[start:end] = torch.tensor(new)
            original = torch.tensor(marks)
            revealed[start:end][x[start:end] != before] = step
            if not masked.any() and torch.equal(x[start:end], before):
                final_kv = True
                break
        if set(x[prompt_length:end].tolist()) & set(eos_ids):
            break
        if not final_kv and end < len(x):
            run.passes.append(Pass("commit", start, 0))
    run.tokens = cut(x[prompt_length:end].tolist()[:gen_length], eos_ids)
    run.revealed = revealed[prompt_length:].tolist()[: len(run.tokens)]
    return run
