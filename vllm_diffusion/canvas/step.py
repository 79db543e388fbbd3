"""One step of every canvas, as one compiled function over all request slots.

A slot's canvas is denoised until the rule finds it done. It is *emitted*

- by that step, if a later pass encodes its tokens;
- by that step, if the keys and values that the step wrote are already final;
- by that step, if the canvas is only read;
- otherwise by the next pass over the same rows, which commits it (:class:`Phase`): all of the
  canvas or, where the rule has the pass verify it, as much as its rows agree with.

The next canvas begins where one is emitted.

All shapes are those of the slots, so the function is compiled once whatever the batch. R is the
number of slots, C the canvas length.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.noise import Purpose, uniform_tokens
from vllm_diffusion.canvas.compiled import compiled
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.decoding.rule import DecodingRule, PositionStatistics, StepDecision, StepInputs
from vllm_diffusion.decoding.ways import Way

_DENOISING, _COMMITTING = int(Phase.DENOISING), int(Phase.COMMITTING)


class SlotInputs(NamedTuple):
    """Inputs of the decision by slot, besides statistics, that are particular to a pass.

    Attributes:
        num_rows: [R], int32, canvas rows of each slot; 0 for a slot that had none.
        seed: [R], int64, each request's seed.
        greedy: [R], bool, requests whose temperature is 0.
        last_known: [R], bool, slots whose statistics at position 0 are of the last known token's
            row, which draws the canvas's first token.
        num_valid: [R], int32, leading positions that a constrained canvas must repeat in its last
            step; 0 where no step may be the last yet, -1 without a constraint.
        free_from: [R], int32, first position that becomes noise whatever the rule decides.
        free_to: [R], int32, the position after the last such one.
    """

    num_rows: Tensor
    seed: Tensor
    greedy: Tensor
    last_known: Tensor
    num_valid: Tensor
    free_from: Tensor
    free_to: Tensor


class StepOutput(NamedTuple):
    """Outcome of a pass by slot, for the engine and for clients that watch.

    Attributes:
        tokens: [R, C], int64: what a canvas would emit, from its first position that is not a known
            token on.
        num_emitted: [R], int32, how many of them are emitted now; 0 for most.
        num_finished: [R], int32, canvas rows whose keys and values are final with this pass.
        denoised: [R], bool, canvases that took a step in this pass.
        done: [R], bool, canvases of these for which it was the last step.
        step: [R], int32, steps that they have taken, this one among them.
        num_given: [R], int32, their leading positions that are known tokens.
        kept: [R, C], bool, positions that enter the next step, or are emitted, as they are.
        decided: [R, C], bool, positions whose token this step wrote: the mask was decided or the
            token replaced; without a mask, another token became the likeliest. At pinned
            positions every step counts.
        decided_step: [R, C], int32, the step that last wrote each position, from 1 on; 0 for pinned
            positions, which none writes.
        num_final: [R], int32, leading positions of each canvas that the step is about, where the
            rule denoises a part of a canvas; ``None`` where it is all of them.
    """

    tokens: Tensor
    num_emitted: Tensor
    num_finished: Tensor
    denoised: Tensor
    done: Tensor
    step: Tensor
    num_given: Tensor
    kept: Tensor
    decided: Tensor
    decided_step: Tensor
    num_final: Tensor | None = None


def temperatures(slots: CanvasSlots, requested: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 tensors [R]: see :meth:`DecodingRule.temperatures`.

    Args:
        slots: The canvases.
        requested: [R], float32, of the requests.
    """
    given = slots.requested.settings, slots.step, slots.requested.max_steps, requested
    return slots.way.choose(lambda way: way.rule, lambda rule: rule.temperatures(*given))


class CanvasStep:
    """Denoise, converge, emit and begin canvases: whatever each slot is at."""

    def __init__(
        self,
        slots: CanvasSlots,
        *,
        converge_at_end: bool = False,
        commits: Callable[[Way], bool] = lambda way: False,
        compile_backend: str | None,
    ) -> None:
        """Bind the step to a server's state.

        Args:
            slots: The state, updated in place.
            converge_at_end: Judge a canvas by its positions up to its first end token.
            commits: Tells of a way whether canvases are emitted by a commit (:class:`PassOrder`),
                and not by the step that converges, unless they are only read.
            compile_backend: Backend of ``torch.compile``; ``None`` runs eagerly.
        """
        self._slots = slots
        self._spec = slots.spec
        self._converge_at_end = converge_at_end
        self._commits = commits
        self._run: Callable[[PositionStatistics, SlotInputs], StepOutput] = compiled(
            self._advance, compile_backend
        )

    def __call__(self, statistics: PositionStatistics, by_slot: SlotInputs) -> StepOutput:
        """Update the state by a pass.

        Args:
            statistics: Of the rows that ran.
            by_slot: Which they were.
        """
        return self._run(statistics, by_slot)

    def _advance(self, statistics: PositionStatistics, by_slot: SlotInputs) -> StepOutput:
        slots = self._slots
        # Without a row after its given positions a canvas waits: an asynchronous pass may be of the
        # rows before a block was emitted, or after the last one.
        has_rows = by_slot.num_rows > slots.num_given
        denoised = has_rows & (slots.phase == _DENOISING)
        committed = has_rows & (slots.phase == _COMMITTING)
        draws_next_first = has_rows & slots.draws_next_first
        position = torch.arange(slots.canvas_length, device=has_rows.device)[None, :]

        decision = self._decide(statistics, by_slot, position)
        # A constraint, if any, lets the step be the last.
        num_valid = by_slot.num_valid
        repeats = decision.result == slots.previous_result
        repeats = (repeats | (position >= num_valid[:, None])).all(dim=-1)
        done = denoised & ((num_valid < 0) | ((num_valid > 0) & repeats))
        done = done & (decision.done | (slots.step + 1 >= slots.requested.max_steps))
        emitted, finished = self._emitted(done, committed, decision)
        layout = self._spec.layout
        num_final = decision.num_final
        if num_final is None:
            of_pass = slots.canvas, statistics.candidate, by_slot.num_rows
            num_final = slots.way.choose(
                lambda way: way.layout, lambda layout: layout.num_final(*of_pass)
            )
        result = torch.where(denoised[:, None], decision.result, slots.canvas)
        step = slots.step + denoised.to(torch.int32)
        before = slots.canvas if self._spec.marks_undecided else self._noise_before(position)
        decided = denoised[:, None] & ((decision.result != before) | slots.pinned)
        written = decided & ~slots.pinned
        decided_step = torch.where(written, step[:, None], slots.decided_step)
        # Positions that are not noise in the next step.
        freed = (position >= by_slot.free_from[:, None]) & (position < by_slot.free_to[:, None])
        kept = decision.keep & ~freed
        output = StepOutput(
            tokens=layout.emitted(result, slots.num_given),
            num_emitted=torch.where(emitted, num_final - slots.num_given, 0),
            num_finished=torch.where(finished, num_final, 0),
            denoised=denoised,
            done=done,
            step=step,
            num_given=slots.num_given.clone(),
            kept=kept | ~denoised[:, None] | done[:, None],
            decided=decided,
            decided_step=decided_step,
            num_final=decision.num_final,
        )

        canvas = self._next_input(decision, kept, by_slot, position)
        canvas = torch.where(done[:, None], result, canvas)
        canvas = torch.where(denoised[:, None], canvas, slots.canvas)
        phase = torch.where(done, _COMMITTING, slots.phase)
        self._write(canvas, phase, output, emitted, decision)
        self._begin(emitted, statistics, by_slot, draws_next_first, num_final, position)
        return output

    def _decide(
        self, statistics: PositionStatistics, by_slot: SlotInputs, position: Tensor
    ) -> StepDecision:
        """Ask the rules."""
        slots = self._slots
        known = position < slots.num_given[:, None]
        fixed = slots.pinned | known
        inputs = StepInputs(
            canvas=slots.canvas,
            # Whatever the model predicts there, an answer has the token that is given.
            predicted=statistics._replace(
                argmax=torch.where(fixed, slots.canvas, statistics.argmax)
            ),
            previous_result=slots.previous_result,
            valid=position < by_slot.num_rows[:, None],
            fixed=fixed,
            known=known,
            end_tokens=slots.requested.end_tokens,
            step=slots.step,
            max_steps=slots.requested.max_steps,
            uniform=self._uniform(by_slot.seed),
            greedy=by_slot.greedy,
        )
        return slots.way.choose(lambda way: way.rule, partial(self._decide_by, inputs))

    def _decide_by(self, inputs: StepInputs, rule: DecodingRule) -> StepDecision:
        """Ask one rule, about all slots."""
        spec, memory = self._spec, self._slots.rule_memory
        if not (self._converge_at_end or rule.judges_to_end):
            inputs = inputs._replace(end_tokens=None)
        named = inputs.predicted.named
        if named is not None and rule.named_tokens != spec.named_tokens:
            own = [spec.named_tokens.index(token) for token in rule.named_tokens]
            inputs = inputs.with_predicted(named=named[..., own])
        decision = rule.decide(inputs, self._slots.requested.settings, memory)
        if len(spec.rules) == 1:
            return decision
        # What only some of the rules say, this one says too.
        if decision.has_final_kv is None and any(each.can_finish_kv for each in spec.rules):
            decision = decision._replace(has_final_kv=torch.zeros_like(decision.done))
        return decision._replace(memory={**memory, **decision.memory})

    def _uniform(self, seed: Tensor) -> Tensor | None:
        """[R, C], float32: random numbers above 0 and below 1, for a rule that draws positions."""
        slots = self._slots
        if not any(rule.draws_positions for rule in self._spec.rules):
            return None
        numbers = uniform_tokens(
            seed, slots.canvas_idx, slots.step, slots.canvas_length, 2**23, Purpose.REVEAL
        )
        return (numbers.to(torch.float32) + 0.5) / 2**23

    def _emitted(
        self, done: Tensor, committed: Tensor, decision: StepDecision
    ) -> tuple[Tensor, Tensor]:
        """Two bool tensors [R]: canvases that this pass emits, and those whose KV is final."""
        commits = self._slots.way.fact(self._commits)
        if commits is False:
            return done, torch.zeros_like(done)
        finished = committed
        if decision.has_final_kv is not None:
            finished = committed | (done & decision.has_final_kv)
        # A canvas that is only read needs no commit. What a pass on its way runs after it is a
        # first step, which needs nothing of the last one.
        emitted = finished | (done & self._slots.requested.read_only)
        if commits is True:
            return emitted, finished
        return torch.where(commits, emitted, done), finished & commits

    def _noise_before(self, position: Tensor) -> Tensor:
        """[R, C]: without a mask, the tokens before a step; a first token that a pass drew is none
        of the step's.
        """
        slots = self._slots
        before = slots.previous_result

        def by_layout(draws_first: bool) -> Tensor:
            return torch.where(position == 0, slots.canvas, before) if draws_first else before

        return slots.way.choose(lambda way: way.layout.draws_first_token, by_layout)

    def _next_input(
        self, decision: StepDecision, kept: Tensor, by_slot: SlotInputs, position: Tensor
    ) -> Tensor:
        """[R, C]: what the next step of a canvas that is not done starts from."""
        slots = self._slots
        canvas = torch.where(
            kept,
            decision.tokens,
            slots.noise(by_slot.seed, slots.canvas_idx, slots.step, Purpose.RENOISE),
        )
        canvas = torch.where(slots.pinned, slots.requested.seed_canvas, canvas)
        return torch.where(position < slots.num_given[:, None], slots.canvas, canvas)

    def _write(
        self,
        canvas: Tensor,
        phase: Tensor,
        output: StepOutput,
        begins: Tensor,
        decision: StepDecision,
    ) -> None:
        """Keep what the step did; slots that begin another canvas forget their last one."""
        slots, denoised = self._slots, output.denoised
        zero = torch.zeros_like(slots.step)
        previous = torch.where(denoised[:, None], decision.result, slots.previous_result)
        slots.canvas.copy_(canvas)
        slots.previous_result.copy_(torch.where(begins[:, None], -1, previous))
        slots.step.copy_(torch.where(begins, zero, output.step))
        slots.decided_step.copy_(torch.where(begins[:, None], 0, output.decided_step))
        slots.phase.copy_(torch.where(begins, slots.first_phase, phase))
        slots.canvas_idx.copy_(slots.canvas_idx + begins.to(torch.int32))
        for name, tensor in slots.rule_memory.items():
            one_each = (-1, *[1] * (tensor.dim() - 1))
            kept = torch.where(denoised.view(one_each), decision.memory[name], tensor)
            tensor.copy_(torch.where(begins.view(one_each), torch.zeros_like(kept), kept))

    def _begin(
        self,
        begins: Tensor,
        statistics: PositionStatistics,
        by_slot: SlotInputs,
        draws_next_first: Tensor,
        num_final: Tensor,
        position: Tensor,
    ) -> None:
        """Fill canvases that begin after another one, and put first tokens that were drawn now."""
        slots, layout = self._slots, self._spec.layout
        seed, first_step = by_slot.seed, torch.zeros_like(slots.step)
        initial = slots.noise(seed, slots.canvas_idx, first_step, Purpose.INITIAL)
        num_given = torch.zeros_like(slots.num_given)
        if layout.keeps_emitted:
            initial = torch.where(position < num_final[:, None], slots.canvas, initial)
            initial = torch.where(slots.pinned, slots.requested.seed_canvas, initial)
            num_given = num_final
        canvas = torch.where(begins[:, None], initial, slots.canvas)
        if any(way.layout.draws_first_token for way in self._spec.ways):
            predicting_position = slots.way.choose(
                lambda way: way.layout, lambda layout: layout.predicting_position(num_final)
            )
            drawn_by = torch.where(draws_next_first, predicting_position, 0).long()[:, None]
            token = statistics.candidate.gather(-1, drawn_by)
            # A token that is pinned in the first canvas stands there from its first step on.
            is_first = draws_next_first[:, None] | (by_slot.last_known[:, None] & ~slots.pinned)
            is_first = is_first & (position == 0)
            canvas = torch.where(is_first, token, canvas)
        slots.canvas.copy_(canvas)
        slots.num_given.copy_(torch.where(begins, num_given, slots.num_given))
        if not layout.keeps_emitted:
            # Pins are positions of the first canvas: in each, as in stock, an answer would repeat
            # their tokens.
            slots.pinned.copy_(slots.pinned & ~begins[:, None])
