"""Per-request tensors of a block-diffusion model, one row per slot, at addresses that never change.

R is the number of slots (``max_num_seqs``), C the canvas length. The host stages what a new
request brings. :meth:`CanvasSlots.apply_staged_writes` copies it once per step and begins the first
canvas at once, since its first step may come with the end of the prompt. The rest is written by the
compiled step of the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from attention_kernels.noise import Purpose, uniform_tokens
from vllm_diffusion.canvas.predictions import FollowedText, Predictions
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.ways import Way, WayOfSlots, holding
from vllm_diffusion.requests.arguments import (
    RequestArguments,
    arguments_of,
    constraining_fields,
    end_token_ids,
)

# vLLM's own bound on the end tokens of a request.
MAX_END_TOKENS = 128


class Phase(IntEnum):
    """The work of a pass on a slot's canvas."""

    # Before its first step too: while the request is at its prompt, no pass has rows of it.
    DENOISING = 0
    # It is decided, and the pass over its rows writes its keys and values, and emits it.
    COMMITTING = 1


@dataclass(frozen=True)
class NewRequest:
    """A slot's new owner.

    Attributes:
        arguments: Its arguments about canvases.
        seed: The seed of its draws.
        prompt_len: Tokens of its prompt.
        num_generated: Tokens that it generated before it was preempted; 0 for a new request.
        given: Tokens of the first canvas's leading positions: the end of the known tokens.
        known: Tokens of its prompt, and those that it generated before.
        suffix_start: Position in the canvas of the first token of ``arguments.suffix``.
        end_tokens: Tokens that end it, at most ``MAX_END_TOKENS``.
        is_constrained: Whether the scheduler holds its canvases to a grammar or words.
    """

    arguments: RequestArguments
    seed: int = 0
    prompt_len: int = 0
    num_generated: int = 0
    given: Sequence[int] = ()
    known: Sequence[int] = ()
    suffix_start: int = 0
    end_tokens: Sequence[int] = ()
    is_constrained: bool = False

    @classmethod
    def of(cls, new_req_data: Any, spec: CanvasSpec) -> NewRequest:
        """Read a request as vLLM hands it to its model runner.

        Args:
            new_req_data: The request. One that was preempted comes back with what it generated as
                part of its prefill; vLLM's warm-up has no sampling parameters.
            spec: How canvases lie and are decided.
        """
        params, known = new_req_data.sampling_params, new_req_data.prefill_token_ids
        arguments, num_prompt = arguments_of(params), new_req_data.prompt_len
        num_answer = params.max_tokens if arguments.suffix else 0
        if spec.closing:
            # As the scheduler has it: an answer leaves room for what stands after it.
            num_answer = min(num_answer, spec.room(num_prompt))
        return cls(
            arguments,
            # The scheduler has chosen one for who brings none.
            seed=(params and params.seed) or 0,
            prompt_len=num_prompt,
            num_generated=len(known) - num_prompt,
            given=known[len(known) - spec.num_given(len(known)) :],
            known=known,
            suffix_start=spec.num_given(num_prompt) + num_answer if arguments.suffix else 0,
            end_tokens=end_token_ids(params) if params else (),
            is_constrained=bool(params and constraining_fields(params)),
        )

    def followed(self, spec: CanvasSpec) -> FollowedText | None:
        """Follow the text that its answer is expected to resemble as far as it had answered, where
        it brings one.
        """
        arguments, known = self.arguments, self.known
        prompt = known[: self.prompt_len] if arguments.predicts_prompt else ()
        if (text := arguments.predicted(prompt)) is None:
            return None
        followed = FollowedText(text, is_prompt=arguments.predicts_prompt)
        width, begin = arguments.canvas_length or spec.length, self.prompt_len
        while begin < len(known):
            end = begin + width - spec.num_given(begin)
            followed.advance(known[begin:end])
            begin = end
        return followed


@dataclass(frozen=True)
class RequestTensors:
    """Arguments of the requests, by slot; a step only reads them.

    Attributes:
        max_steps: [R], int32, the step cap.
        settings: [R] each, the rule's settings by name.
        read_only: [R], bool, canvases that need no commit.
        maps_steps: [R], bool, requests that ask which step decided each token.
        seed_canvas: [R, C], int64, first canvases that requests bring.
        end_tokens: [R, E], int64, tokens that end the request; -1 where there are fewer.
    """

    max_steps: Tensor
    settings: dict[str, Tensor]
    read_only: Tensor
    maps_steps: Tensor
    seed_canvas: Tensor
    end_tokens: Tensor


class SlotFeatures:
    """Features that slots use, known on the host, so that an unused one costs nothing.

    Attributes:
        viewed: Slots whose canvases leave the device: a client watches them, or a constraint reads
            them.
        allowed_ids: The only ids whose probabilities are read of a read-only canvas, by slot.
        pinned: Slots whose first canvas has pinned positions, those of a suffix among them.
        one_step: Slots whose only canvas is read after its first step.
    """

    def __init__(self) -> None:
        self.one_step: set[int] = set()
        self.viewed: set[int] = set()
        self.allowed_ids: dict[int, tuple[int, ...]] = {}
        self.pinned: set[int] = set()

    def add_request(self, slot: int, request: NewRequest) -> None:
        """Note what ``slot``'s new owner uses."""
        self.remove_request(slot)
        arguments = request.arguments
        if arguments.shown or request.is_constrained:
            self.viewed.add(slot)
        if arguments.allowed_ids is not None:
            self.allowed_ids[slot] = arguments.allowed_ids
        if arguments.pinned or arguments.suffix:
            self.pinned.add(slot)
        # No constraint adds steps: none goes with a read-only canvas.
        if arguments.read_only and arguments.max_steps == 1:
            self.one_step.add(slot)

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``."""
        self.viewed.discard(slot)
        self.allowed_ids.pop(slot, None)
        self.pinned.discard(slot)
        self.one_step.discard(slot)

    def held_to(self, slots: Sequence[int]) -> frozenset[int] | None:
        """Return all ids whose probabilities are read of some slots; ``None`` if one of them is not
        held to a few.
        """
        if not self.allowed_ids.keys() >= set(slots):
            return None
        return frozenset().union(*(self.allowed_ids[slot] for slot in slots))


class CanvasSlots:
    """The canvases of all running requests.

    Attributes:
        spec: How they lie and are decided.
        vocab_size: Number of token ids.
        phase: [R], int8, :class:`Phase` of each canvas.
        canvas: [R, C], int64, what the next pass starts from.
        previous_result: [R, C], int64, what the last step would have emitted; -1 before the first.
        step: [R], int32, steps that the canvas has taken.
        decided_step: [R, C], int32, the step, from 1 on, that wrote what each position would emit;
            0 before the first one, and where no step writes.
        canvas_idx: [R], int32, canvases of the request before this one.
        num_given: [R], int32, leading positions that are known tokens.
        pinned: [R, C], bool, positions of a first canvas that hold the token which the request
            brings, from its first step to the answer; none are given ones. A canvas that holds the
            sequence keeps them.
        rule_memory: Tensors that the rule remembers, by name; see :class:`Memory`.
        requested: Arguments of the requests.
        way: The way of each slot's request.
        block_length: [R], int64, on the host: positions of each canvas that are denoised at a time.
        num_after: [R], int64, on the host: positions of a canvas after the answer.
        draws_first_token: [R], bool, on the host: ``CanvasLayout.draws_first_token`` by slot.
        features: Features that slots use, on the host.
        predictions: Texts that answers are expected to resemble.
    """

    def __init__(
        self, num_slots: int, spec: CanvasSpec, vocab_size: int, device: torch.device
    ) -> None:
        R, C = num_slots, spec.length
        self.spec = spec
        self.vocab_size = vocab_size

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.phase = zeros(R, dtype=torch.int8)
        self.canvas = zeros(R, C, dtype=torch.int64)
        self.previous_result = zeros(R, C, dtype=torch.int64)
        self.step = zeros(R, dtype=torch.int32)
        self.decided_step = zeros(R, C, dtype=torch.int32)
        self.canvas_idx = zeros(R, dtype=torch.int32)
        self.num_given = zeros(R, dtype=torch.int32)
        self.pinned = zeros(R, C, dtype=torch.bool)
        widths = {"canvas": (), "position": (C,), "step": (spec.max_denoising_steps,)}
        self.rule_memory = {
            name: zeros(R, *widths[memory.per], dtype=memory.dtype)
            for rule in spec.rules
            for name, memory in rule.memory.items()
        }
        self.requested = RequestTensors(
            max_steps=zeros(R, dtype=torch.int32),
            settings={
                name: zeros(R, dtype=setting.dtype) for name, setting in spec.rule_settings.items()
            },
            read_only=zeros(R, dtype=torch.bool),
            maps_steps=zeros(R, dtype=torch.bool),
            seed_canvas=zeros(R, C, dtype=torch.int64),
            end_tokens=zeros(R, MAX_END_TOKENS, dtype=torch.int64),
        )
        self.way = WayOfSlots(spec.ways, R, device)
        self.block_length = np.full(R, C, dtype=np.int64)
        self.num_after = np.zeros(R, dtype=np.int64)
        self.draws_first_token = np.full(R, spec.layout.draws_first_token)
        self.features = SlotFeatures()
        self.predictions = Predictions(R, device)
        self._staged: dict[int, NewRequest] = {}

    @property
    def num_slots(self) -> int:
        """R, requests that run at once."""
        return len(self.phase)

    @property
    def canvas_length(self) -> int:
        """C, positions of a canvas."""
        return self.spec.length

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.phase.device

    @property
    def draws_next_first(self) -> Tensor:
        """[R], bool: canvases in their commit, of which a row draws the next one's first token."""
        is_committed = self.phase == int(Phase.COMMITTING)
        return holding(self.way.fact(lambda way: way.layout.draws_first_token), is_committed)

    @property
    def first_phase(self) -> Tensor:
        """[R], int8: the :class:`Phase` in which canvases begin, a commit's where none denoises
        them.
        """
        denoises = self.way.fact(lambda way: way.denoises)
        denoising, committing = int(Phase.DENOISING), int(Phase.COMMITTING)
        if isinstance(denoises, bool):
            return torch.full_like(self.phase, denoising if denoises else committing)
        return torch.where(denoises, denoising, committing).to(self.phase.dtype)

    def add_request(self, slot: int, request: NewRequest) -> None:
        """Stage a new owner of ``slot``; every tensor's row is rewritten."""
        self._staged[slot] = request
        self.block_length[slot] = self.spec.block_length(request.arguments.settings)
        self.draws_first_token[slot] = self.way_of(request).layout.draws_first_token
        self.num_after[slot] = self.spec.layout.num_after(len(request.arguments.suffix))
        self.features.add_request(slot, request)

    def way_of(self, request: NewRequest) -> Way:
        """Return the way of a request."""
        return self.spec.ways[request.arguments.way]

    def remove_request(self, slot: int) -> None:
        """Forget what the host keeps of ``slot``; its tensors are rewritten by the next owner."""
        self._staged.pop(slot, None)
        self.features.remove_request(slot)
        self.predictions.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Copy staged rows to the device, all at once."""
        if not self._staged:
            return
        C, spec, requested = self.canvas_length, self.spec, self.requested
        index = self._to_device(np.array(list(self._staged), dtype=np.int64))
        rows = list(self._staged.values())
        texts = [row.followed(spec) for row in rows]
        of_slots = zip(self._staged, texts, strict=True)
        if brought := {slot: text for slot, text in of_slots if text is not None}:
            self.predictions.write(brought)
        self._staged.clear()

        num_before = [self._num_canvases(row) for row in rows]
        chosen = [spec.all_settings(row.arguments.settings) for row in rows]
        known = spec.rule_settings
        for tensor, values in (
            (requested.max_steps, [row.arguments.step_cap(spec) for row in rows]),
            *(
                (tensor, [known[name].number(own[name]) for own in chosen])
                for name, tensor in requested.settings.items()
            ),
            (requested.read_only, [row.arguments.read_only for row in rows]),
            (requested.maps_steps, [row.arguments.shown.step_map for row in rows]),
            (self.canvas_idx, num_before),
            (self.num_given, [len(row.given) for row in rows]),
        ):
            tensor[index] = self._to_device(torch.tensor(values, dtype=tensor.dtype).numpy())
        # Assigning a number by index would wait for the device to take it.
        for tensor in (self.step, self.decided_step, *self.rule_memory.values()):
            tensor.index_fill_(0, index, 0)
        self.previous_result.index_fill_(0, index, -1)
        self.phase.index_fill_(0, index, int(Phase.DENOISING))
        if self.way.index is not None:
            ways = np.array([row.arguments.way for row in rows], dtype=np.int32)
            self.way.index[index] = self._to_device(ways)
            self.phase[index] = self.first_phase[index]

        # On the host, so that nothing is launched for it: a draw is the same on any device.
        seed = torch.tensor([row.seed for row in rows])
        canvas_idx = torch.tensor(num_before)
        first_step = torch.zeros_like(canvas_idx)
        canvas = self.noise(seed, canvas_idx, first_step, Purpose.INITIAL).numpy()
        seed_canvas = np.zeros((len(rows), C), dtype=np.int64)
        pinned = np.zeros((len(rows), C), dtype=bool)
        end_tokens = np.full((len(rows), MAX_END_TOKENS), -1, dtype=np.int64)
        for i, row in enumerate(rows):
            end_tokens[i, : len(row.end_tokens)] = row.end_tokens
            if row.arguments.seed_canvas is not None:
                seed_canvas[i, : len(row.arguments.seed_canvas)] = row.arguments.seed_canvas
                if num_before[i] == 0:
                    canvas[i] = seed_canvas[i]
                    pinned[i, list(row.arguments.pinned)] = True
                    pinned[i, : len(row.given)] = False
            if suffix := row.arguments.suffix:
                after = slice(row.suffix_start, row.suffix_start + len(suffix))
                canvas[i, after] = seed_canvas[i, after] = suffix
                pinned[i, after] = True
            if (text := texts[i]) is not None:
                text.begin(canvas[i, len(row.given) :])
            canvas[i, : len(row.given)] = row.given
        self.canvas[index] = self._to_device(canvas)
        requested.seed_canvas[index] = self._to_device(seed_canvas)
        self.pinned[index] = self._to_device(pinned)
        requested.end_tokens[index] = self._to_device(end_tokens)

    def noise(self, seed: Tensor, canvas_idx: Tensor, step: Tensor, purpose: Purpose) -> Tensor:
        """Tokens that fill positions without a decided one.

        Args:
            seed: [num_canvases], int64.
            canvas_idx: [num_canvases], integer.
            step: [num_canvases], integer.
            purpose: What the draw is for.

        Returns:
            [num_canvases, C], int64.
        """
        mask = self.spec.mask_token_id
        if mask is None:
            ids = self.spec.noise_tokens or range(self.vocab_size)
            length = self.canvas_length
            return ids.start + uniform_tokens(seed, canvas_idx, step, length, len(ids), purpose)
        return torch.full(
            (len(seed), self.canvas_length), mask, dtype=torch.int64, device=seed.device
        )

    def _num_canvases(self, row: NewRequest) -> int:
        """Canvases that the request emitted before."""
        arguments = row.arguments
        length = arguments.canvas_length or self.spec.block_length(arguments.settings)
        return self.spec.layout.num_before(row.prompt_len, row.num_generated, length)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self.device)
