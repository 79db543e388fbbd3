"""LLaDA2.2's rule: reveal and rewrite, and also delete positions and insert masks."""

import torch
from torch import Tensor

from vllm_diffusion.decoding.reveal import STRATEGIES, RevealAndEdit
from vllm_diffusion.decoding.rule import (
    Choice,
    Memory,
    Setting,
    StepDecision,
    StepInputs,
    Tensors,
    Values,
)

# Positions that a step which repeats an earlier one draws again, at most.
MAX_ESCAPES = 5


class Levenshtein(RevealAndEdit):
    """Rule :class:`RevealAndEdit` with tokens that move the positions after them.

    - DELETE drops its position: the tokens after it move left, and masks fill up on the right.
    - SPLIT becomes a mask and, after it, the token that stood there before the step; tokens that
      move beyond the end are lost. DELETE and SPLIT act among the positions that are not fixed, and
      neither is ever part of a result.
    - A step reveals at least its share of the canvas's first masks over ``reveal_steps`` steps, and
      as many more as edits have made. Later steps reveal all masks.
    - Steps that find none of the first masks are post steps. The ``max_post_steps``-th is the final
      step, as is the last that the step cap allows: it reveals every mask, and writes the likeliest
      token that neither deletes nor splits. With ``max_post_steps`` 0 the final step is the one
      that reveals the last of the first masks.
    - If a step's tokens, before they move anything, are those of an earlier step of this canvas,
      then the least confident position that it changes takes its likeliest other token, the
      leftmost of equals, up to ``MAX_ESCAPES`` times in a step; without it, steps could repeat each
      other in a circle up to the step cap. An earlier step is remembered as 64 bits.
    - The canvas is done with a step that leaves no mask and repeats the one before it, or with the
      final one.

    Masks are drawn at the request's temperature and judged by the model's own probability of the
    drawn token; rewritten positions take the likeliest token.

    Source: the description of ``_joint_decode_block`` of inclusionAI/LLaDA2.2-flash in
    FLX-OSS/FluxServe and ``decoders/levenshtein.py`` there, at 5dcf8a8.
    """

    settings = {
        **RevealAndEdit.settings,
        "strategy": Choice(
            STRATEGIES,
            "what a step reveals: what is above the threshold; the most probable, the leftmost or those "
            "of least entropy of an even schedule over `reveal_steps`; or what an entropy budget holds",
        ),
        "max_post_steps": Setting(
            int, 0, 10_000, "a canvas ends after as many steps that found none of its first masks"
        ),
        "reveal_steps": Setting(
            int,
            1,
            10_000,
            "the first masks are revealed over as many steps; a later one reveals all",
        ),
    }
    # The checkpoint is published with one mode.
    presets = {}
    memory = {
        "post_steps": Memory(torch.int32),
        # Masks that the canvas began with and that no step has revealed; they move with the rest.
        "is_first": Memory(torch.bool, "position"),
        # Fingerprints of the tokens that each earlier step wrote.
        "fingerprints": Memory(torch.int64, "step"),
    }
    # The likeliest token, its alternative, and one that is neither DELETE nor SPLIT.
    num_choices = 3
    # Log-probabilities are kept by position from the step that draws a token to its emission.
    refused_fields = dict.fromkeys(
        ("logprobs", "logprob_token_ids"),
        "is not supported by this model, which moves tokens away from where they were drawn; "
        "leave it out.",
    )

    def __init__(self, mask_token_id: int, *, delete_token_id: int, split_token_id: int) -> None:
        """Set the token ids of a checkpoint.

        Args:
            mask_token_id: Token of positions that are not revealed.
            delete_token_id: Token DELETE.
            split_token_id: Token SPLIT.
        """
        super().__init__(mask_token_id, at_request_temperature=False)
        self.delete_token_id = delete_token_id
        self.split_token_id = split_token_id

    def faster(self, values: Values, max_steps: int, length: int) -> Values:
        return super().faster(values, int(values["reveal_steps"]), length)

    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        predicted = inputs.predicted
        assert predicted.choices is not None
        assert predicted.confidence is not None
        canvas, free = inputs.canvas, inputs.valid & ~inputs.fixed
        masked = self.masked(inputs)
        is_first = masked & ((inputs.step == 0)[:, None] | memory["is_first"])
        reveal = self._reveal(inputs, settings, masked, is_first)
        drawn = torch.where(masked, predicted.candidate, predicted.argmax)
        confidence = torch.where(masked, predicted.drawn_confidence, predicted.confidence)
        edit = free & ~masked & (drawn != canvas)
        edit = edit & (confidence > settings["editing_threshold"][:, None])

        most = settings["max_post_steps"]
        finds_first = is_first.any(dim=-1)
        # No later step has first masks once none is left.
        post_steps = memory["post_steps"] + (~finds_first).to(torch.int32)
        reveals_last = finds_first & ~(is_first & ~reveal).any(dim=-1)
        at_cap = inputs.step + 1 >= inputs.max_steps
        is_final = torch.where(most > 0, post_steps >= most, reveals_last) | at_cap
        plain = self._plain(predicted.choices)
        drawn = torch.where(is_final[:, None] & self._is_operation(drawn), plain, drawn)
        write = edit | reveal | (masked & is_final[:, None])
        written = torch.where(write, drawn, canvas)
        written, fingerprints = self._escape(
            inputs, written, confidence, ~is_final, memory["fingerprints"]
        )

        tokens, is_first = self._move(written, canvas, free, is_first)
        left = free & (tokens == self.mask_token_id)
        counted = inputs.counted(tokens, ~left)
        leaves_none = ~(left & counted).any(dim=-1)
        # True if the canvas is as before this step, unless a constraint masked some of it again.
        repeats = ((tokens == inputs.previous_result) | ~counted).all(dim=-1)
        done = (leaves_none & (repeats | (post_steps >= most))) | at_cap
        # After an end token masks may be left.
        result = torch.where(done[:, None] & left, plain, tokens)
        return StepDecision(
            keep=~left,
            tokens=tokens,
            result=result,
            done=done,
            memory={
                "post_steps": post_steps,
                "is_first": is_first & left,
                "fingerprints": fingerprints,
            },
            has_final_kv=((result == canvas) | ~inputs.valid).all(dim=-1),
        )

    def _is_operation(self, tokens: Tensor) -> Tensor:
        return (tokens == self.delete_token_id) | (tokens == self.split_token_id)

    def _plain(self, choices: Tensor) -> Tensor:
        """Return the likeliest token that neither deletes nor splits, [R, C], int64."""
        is_plain = ~self._is_operation(choices)
        first = is_plain.to(torch.int32).argmax(dim=-1, keepdim=True)
        return choices.gather(-1, first)[..., 0]

    def _reveal(
        self, inputs: StepInputs, settings: Tensors, masked: Tensor, is_first: Tensor
    ) -> Tensor:
        """Return the masks that a step before the final one reveals, [R, C], bool."""
        # Unused slots hold 0.
        steps = settings["reveal_steps"].clamp(min=1)
        num_masks = (inputs.valid & ~inputs.fixed).sum(dim=-1)
        share = num_masks // steps + (inputs.step < num_masks % steps).long()
        num_made = (masked & ~is_first).sum(dim=-1)
        reveal = self.revealed(inputs, settings, masked, share + num_made)
        return torch.where((inputs.step >= steps)[:, None], masked, reveal)

    def _escape(
        self,
        inputs: StepInputs,
        written: Tensor,
        confidence: Tensor,
        may_escape: Tensor,
        fingerprints: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Change the tokens of a step that would repeat an earlier one.

        Args:
            inputs: Inputs of the step.
            written: [R, C], int64, tokens that it would write.
            confidence: [R, C], float32, their probabilities.
            may_escape: [R], bool, canvases that may be changed.
            fingerprints: [R, N], int64, fingerprints of the previous steps.

        Returns:
            The tokens, [R, C], int64, and the fingerprints with this step's.
        """
        assert inputs.predicted.choices is not None
        column = torch.arange(fingerprints.shape[-1], device=written.device)
        step = inputs.step[:, None]
        for _ in range(MAX_ESCAPES):
            same = fingerprints == _fingerprint(written)[:, None]
            is_repeated = (same & (column < step)).any(dim=-1)
            changed = written != inputs.canvas
            again = is_repeated & may_escape & changed.any(dim=-1)
            place = torch.where(changed, confidence, torch.inf).argmin(dim=-1, keepdim=True)
            there = written.gather(-1, place)
            likeliest, second, _ = inputs.predicted.choices.gather(
                1, place[..., None].expand(-1, -1, self.num_choices)
            ).unbind(-1)
            other = torch.where(there == likeliest, second, likeliest)
            written = written.scatter(-1, place, torch.where(again[:, None], other, there))
        return written, torch.where(column == step, _fingerprint(written)[:, None], fingerprints)

    def _move(
        self, written: Tensor, before: Tensor, free: Tensor, is_first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Carry out the deletions and splits of a step.

        Args:
            written: [R, C], int64, tokens that the step wrote.
            before: [R, C], int64, tokens before the step.
            free: [R, C], bool, positions that may move.
            is_first: [R, C], bool, positions that were among the canvas's first masks.

        Returns:
            The tokens, and true for positions that were among the first masks, both [R, C].
        """
        length = written.shape[-1]
        deletes = free & (written == self.delete_token_id)
        splits = free & (written == self.split_token_id)
        # Index, among the free positions, of the first token of each.
        num_tokens = free.long() - deletes.long() + splits.long()
        start = num_tokens.cumsum(dim=-1) - num_tokens
        # Deleted tokens, and tokens beyond the end, go to a column that is not read.
        nowhere = torch.full_like(start, length)
        first = torch.where(free & ~deletes, start, nowhere).clamp(max=length)
        second = torch.where(splits, start + 1, nowhere).clamp(max=length)
        tokens = torch.full_like(written, self.mask_token_id)
        tokens = torch.nn.functional.pad(tokens, (0, 1), value=self.mask_token_id)
        tokens = tokens.scatter(-1, first, torch.where(splits, self.mask_token_id, written))
        tokens = tokens.scatter(-1, second, before)
        marks = torch.zeros_like(tokens, dtype=torch.bool)
        marks = marks.scatter(-1, first, is_first & ~splits).scatter(-1, second, is_first)
        place = (free.cumsum(dim=-1) - 1).clamp(min=0)
        return (
            torch.where(free, tokens.gather(-1, place), written),
            free & marks.gather(-1, place),
        )


def _fingerprint(tokens: Tensor) -> Tensor:
    """Hash [R, C] token ids below 2**24 with their positions to 64 bits, [R], int64.

    Source: the finaliser of SplitMix64, as int64 wraps it, over token and position.
    """
    position = torch.arange(tokens.shape[-1], device=tokens.device)
    mixed = tokens + (position + 1) * 2**24
    for factor in (-4658895280553007687, -7723592293110705685):
        # Multiply only what depends on tokens: TorchInductor does arithmetic of positions alone by
        # itself.
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return mixed.sum(dim=-1)
