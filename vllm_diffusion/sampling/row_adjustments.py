"""Adjustments of logits that requests ask for, laid out for the rows of a batch.

``allowed_token_ids``, ``logit_bias``, ``min_tokens``, the penalties and the constraints of the
scheduler change every distribution of a row: the candidate's, the argmax, the entropy and the
self-conditioning signal. Their meanings and their order are those of vLLM's own processors, which
work on whole rows; here they are tables that are read wherever a logit is
(:class:`attention_kernels.vocab_statistics.LogitAdjustments`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from attention_kernels.vocab_statistics import NO_ID, LogitAdjustments
from vllm_diffusion.canvas.messages import CanvasGrammarOutput
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.sampling.thought_ends import ThoughtEnds
from vllm_diffusion.sampling.used_settings import UsedSettings

_PIN, _MASK, _RESTART = range(3)


class TokenMasks:
    """Tokens that constraints allow in the last pass, at addresses that never change, for graphs.

    R is the number of slots, N the most rows of a pass.

    Attributes:
        rows: [N, 3], int32: the only token of a row; the row of ``masks`` with the tokens that it
            may draw; 1 where its next step starts without a self-conditioning signal. -1 where a
            row has none.
        masks: [R, ceil(vocab_size / 32)], int32: a bit for each token that may be drawn in a row.
    """

    def __init__(self, pass_rows: PassRows, vocab_size: int) -> None:
        """Allocate for the largest pass.

        Args:
            pass_rows: The rows of a pass.
            vocab_size: Number of token ids.
        """
        self._pass_rows = pass_rows
        index = pass_rows.index
        R = len(pass_rows.of_slots.num_rows)
        self.rows = torch.full((len(index), 3), -1, dtype=torch.int32, device=index.device)
        self.masks = torch.zeros(R, -(-vocab_size // 32), dtype=torch.int32, device=index.device)

    def restart(self, rows: slice | Tensor) -> Tensor:
        """[num_rows], bool: rows whose next step starts without a self-conditioning signal."""
        return self.rows[rows, _RESTART] > 0

    def clear(self) -> None:
        """Lift all constraints, for a pass without any."""
        self.rows.fill_(-1)

    def take(self, message: CanvasGrammarOutput, req_ids: Sequence[str]) -> int:
        """Lay allowed tokens out over the pass's rows and slots.

        Args:
            message: The scheduler's.
            req_ids: Requests of the batch, in its order.

        Returns:
            How many of ``masks`` are used.
        """
        pass_rows, starts = self._pass_rows, self._pass_rows.requests.starts
        rows = np.full((pass_rows.num_rows, 3), -1, dtype=np.int32)
        num_valid, free_from, free_to = of_slots = np.zeros(
            tuple(pass_rows.of_constraints.shape), dtype=np.int32
        )
        num_valid.fill(-1)
        masks: list[np.ndarray] = []
        layout = pass_rows.slots.spec.layout
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        for req_id, allowed in zip(
            message.structured_output_request_ids, message.allowed, strict=True
        ):
            i = index.get(req_id)
            if i is None:
                continue
            slot = int(pass_rows.requests.slots[i])
            start, end = int(starts[i]), int(starts[i + 1])
            # Where its canvas would begin, if all of its positions had rows here.
            start -= layout.first_sampled(allowed.num_given)
            first = start + allowed.num_given
            frontier = min(first + len(allowed.pinned), end)
            rows[first:frontier, _PIN] = allowed.pinned[: frontier - first]
            if allowed.num_valid > 0:
                num_valid[slot] = allowed.num_given + allowed.num_valid
            else:
                num_valid[slot] = 0
            if allowed.frontier_mask is not None and frontier < end:
                rows[frontier, _MASK] = len(masks)
                masks.append(allowed.frontier_mask)
                # The frontier is noise until it is settled.
                free_from[slot], free_to[slot] = frontier - start, frontier - start + 1
            if allowed.restart:
                rows[frontier:end, _RESTART] = 1
                free_from[slot], free_to[slot] = frontier - start, end - start

        async_tensor_h2d(rows, out=self.rows[: len(rows)])
        async_tensor_h2d(of_slots, out=pass_rows.of_constraints)
        if masks:
            async_tensor_h2d(np.stack(masks), out=self.masks[: len(masks)])
        return len(masks)


_FORBIDDEN = float("-inf")
# Entries of a list, with the last that ends it: at most 1,024 biases and 128 end tokens
# (``requests/validation.py``).
_LIST_LENGTH = 2048
# Lists of a slot.
_ALWAYS, _EARLY, _READABLE, _BOOSTED = range(4)
_NUM_LISTS = 4


class _Lists(NamedTuple):
    """Lists of ids of all slots, four a slot; see :class:`LogitAdjustments`."""

    ids: Tensor
    offsets: Tensor
    others: Tensor

    def write(self, row: int, listed: dict[int, float], other: float) -> None:
        """Replace a list.

        Args:
            row: Which one.
            listed: Offsets by id.
            other: Offset of all other ids.
        """
        ids = np.full(_LIST_LENGTH, NO_ID, dtype=np.int32)
        offsets = np.zeros(_LIST_LENGTH, dtype=np.float32)
        order = sorted(listed)
        ids[: len(order)] = order
        offsets[: len(order)] = [listed[i] for i in order]
        async_tensor_h2d(ids, out=self.ids[row])
        async_tensor_h2d(offsets, out=self.offsets[row])
        self.others[row] = other


class _SlotNumbers(NamedTuple):
    """Numbers of one slot or, by slot, [R] int32 each; -1 for none.

    Attributes:
        always: List that is added to the request's logits from ``min_length`` on.
        early: List that is added before it.
        readable: List of the ids that a read-only canvas reports.
        boosted: List of the one id that ends a thought.
        min_length: Tokens of prompt and answer.
        penalty_idx: The slot itself, where it has penalties.
    """

    always: Any
    early: Any
    readable: Any
    min_length: Any
    penalty_idx: Any = -1
    boosted: Any = -1


class RowAdjustments:
    """Adjustments of all slots; :meth:`bind` gives those of some rows."""

    def __init__(
        self,
        stock_sampler: Any,
        token_masks: TokenMasks,
        vocab_size: int,
        thought_ends: ThoughtEnds | None = None,
    ) -> None:
        """Allocate for all slots.

        Args:
            stock_sampler: vLLM's.
            token_masks: Of the last pass.
            vocab_size: Number of token ids.
            thought_ends: Tokens that are boosted; ``None`` if the rule boosts none.
        """
        num_slots, device = len(token_masks.masks), token_masks.masks.device
        self._vocab_size = vocab_size
        self._device = device
        self._token_masks = token_masks
        # vLLM's runner counts committed tokens in it.
        self._state = stock_sampler.penalties_state
        self._prompt_len = stock_sampler.req_states.prompt_len
        self._thought_ends = thought_ends
        size = (_NUM_LISTS * num_slots, _LIST_LENGTH)
        self._lists = _Lists(
            torch.full(size, NO_ID, dtype=torch.int32, device=device),
            torch.zeros(size, device=device),
            torch.zeros(size[0], device=device),
        )
        # By slot.
        self._listed: dict[int, _SlotNumbers] = {}
        self._penalised: set[int] = set()
        self._is_staged = False

        # One tensor, so that one copy fills it.
        self._held = torch.zeros(
            len(_SlotNumbers._fields), num_slots, dtype=torch.int32, device=device
        )
        self._numbers = _SlotNumbers(*self._held)
        # vLLM keeps these where the host writes them, in turn in one of several places.
        self._repetition, self._frequency, self._presence = (
            torch.zeros(num_slots, dtype=torch.float32, device=device) for _ in range(3)
        )

    def add_request(
        self,
        slot: int,
        sampling_params: Any,
        readable: tuple[int, ...] | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> None:
        """Take the adjustments that a new owner of ``slot`` asks for.

        Args:
            slot: Its row in every state.
            sampling_params: vLLM's.
            readable: The only ids that a read-only canvas reports; ``None`` for all.
            forbidden: Ids that its settings forbid.
        """
        self.remove_request(slot)
        self._is_staged = True
        if self._state.add_request(slot, sampling_params):
            self._penalised.add(slot)
        boost = self._thought_ends
        if boost is not None and (tokens := arguments_of(sampling_params).thought_end):
            num_prompt = int(self._prompt_len.np[slot])
            boost.add_request(slot, tokens, num_prompt, sampling_params.max_tokens)
            # No other list goes with it: the checks of a request, and the layout, refuse them.
            assert readable is None
            assert not forbidden
            boosted = _NUM_LISTS * slot + _BOOSTED
            self._lists.write(boosted, {}, 0.0)
            self._listed[slot] = _SlotNumbers(-1, -1, -1, 0, boosted=boosted)
            return
        bias, allowed = sampling_params.logit_bias, sampling_params.allowed_token_ids
        barred = [i for i in forbidden if i < self._vocab_size]
        if barred:
            bias = {**(bias or {}), **dict.fromkeys(barred, _FORBIDDEN)}
        ends: list[int] = []
        if sampling_params.min_tokens > 0:
            # A request may name ids that the model does not have.
            ends = [i for i in sampling_params.all_stop_token_ids if 0 <= i < self._vocab_size]
        if readable is None and not (bias or ends or allowed):
            return
        listed: dict[int, float] = {}
        other = 0.0
        readable_row = always = early = -1
        if readable is not None:
            listed, other = dict.fromkeys(readable, 0.0), _FORBIDDEN
            readable_row = always = _NUM_LISTS * slot + _READABLE
            self._lists.write(readable_row, listed, other)
        if allowed:
            # The allowed ids among the readable ones.
            listed = {i: 0.0 for i in allowed if readable is None or i in listed}
            other = _FORBIDDEN
        if bias:
            listed |= {i: value for i, value in bias.items() if other == 0.0 or i in listed}
        if allowed or bias:
            always = _NUM_LISTS * slot + _ALWAYS
            self._lists.write(always, listed, other)
        early = always
        if ends:
            early = _NUM_LISTS * slot + _EARLY
            self._lists.write(early, listed | dict.fromkeys(ends, _FORBIDDEN), other)
        min_length = int(self._prompt_len.np[slot]) + sampling_params.min_tokens
        self._listed[slot] = _SlotNumbers(always, early, readable_row, min_length)

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``'s settings; the device's are not read until it has an owner."""
        self._listed.pop(slot, None)
        if self._thought_ends is not None:
            self._thought_ends.remove_request(slot)
        self._penalised.discard(slot)

    def apply_staged_writes(self) -> None:
        """Copy the adjustments of new requests to the device, if there are any."""
        if not self._is_staged:
            return
        self._is_staged = False
        state, num_slots = self._state, self._held.shape[1]
        state.apply_staged_writes()
        held = np.full(tuple(self._held.shape), -1, dtype=np.int32)
        for slot, own in self._listed.items():
            held[:, slot] = own
        penalised = list(self._penalised)
        _SlotNumbers(*held).penalty_idx[penalised] = penalised
        async_tensor_h2d(held, out=self._held)
        self._repetition.copy_(state.repetition_penalty.gpu[:num_slots])
        self._frequency.copy_(state.frequency_penalty.gpu[:num_slots])
        self._presence.copy_(state.presence_penalty.gpu[:num_slots])

    def used_by(self, slots: np.ndarray, num_masks: int | None) -> UsedSettings:
        """Find the adjustments that some slots use.

        Args:
            slots: [num_reqs], slots that have rows.
            num_masks: Masks of the pass's constraints; ``None`` if it has none.
        """
        owned = [self._listed[slot] for slot in slots.tolist() if slot in self._listed]
        lists = {i for own in owned for i in (own.always, own.early, own.boosted) if i >= 0}
        return UsedSettings(
            lists=tuple(sorted(lists)),
            penalties=not self._penalised.isdisjoint(slots.tolist()),
            pins=num_masks is not None,
            num_masks=num_masks or 0,
        )

    def all_used(self) -> UsedSettings:
        """Adjustments that any batch may use, for a graph that serves each."""
        lists = tuple(range(len(self._lists.others)))
        num_masks = len(self._token_masks.masks)
        return UsedSettings(lists=lists, penalties=True, pins=True, num_masks=num_masks)

    def place_thought_ends(self) -> None:
        """Put the boosted token of each slot, and its offset, where the rows of the pass read
        them.
        """
        ends = self._thought_ends
        if ends is not None and ends.is_used:
            ends.update()
            self._lists.ids[_BOOSTED::_NUM_LISTS, 0] = ends.token.int()
            self._lists.offsets[_BOOSTED::_NUM_LISTS, 0] = ends.offset

    def bind(
        self, used: UsedSettings, rows: slice | Tensor, slot: Tensor, drawn_at: Tensor
    ) -> LogitAdjustments:
        """Bind adjustments to some rows.

        Args:
            used: Settings that the pass uses.
            rows: Which rows of the pass: [num_rows].
            slot: [num_rows], int64, theirs.
            drawn_at: [num_rows], int64: where in its sequence the token stands that each row draws.
        """
        adjustments = self.none(len(slot))
        if used.lists:
            numbers = self._numbers
            is_early = drawn_at < numbers.min_length[slot]
            list_idx = torch.where(is_early, numbers.early[slot], numbers.always[slot])
            if self._thought_ends is not None and self._thought_ends.is_used:
                is_end = drawn_at == self._thought_ends.position[slot]
                list_idx = torch.where(is_end, numbers.boosted[slot], list_idx)
            adjustments = adjustments._replace(**self._read(list_idx, used.lists))
        if used.penalties:
            adjustments = adjustments._replace(
                penalty_idx=self._numbers.penalty_idx[slot],
                prompt_mask=self._state.prompt_bin_mask,
                output_counts=self._state.output_bin_counts,
            )
        if used.pins:
            adjustments = adjustments._replace(
                pin=self._token_masks.rows[rows, _PIN].contiguous(),
                mask_idx=self._token_masks.rows[rows, _MASK].contiguous(),
                masks=self._token_masks.masks[: used.num_masks],
            )
        return adjustments

    def has_readable(self, slots: np.ndarray) -> bool:
        """Return true if some read-only slots report a few ids alone."""
        return any(own.readable >= 0 for slot in slots if (own := self._listed.get(int(slot))))

    def bind_readable(self, slot: Tensor) -> LogitAdjustments:
        """Bind the ids that read-only canvases report.

        Args:
            slot: [num_rows], int64, of the rows that are reported.
        """
        lists = tuple(own.readable for own in self._listed.values() if own.readable >= 0)
        return self.none(len(slot))._replace(**self._read(self._numbers.readable[slot], lists))

    def none(self, num_rows: int) -> LogitAdjustments:
        """Adjustments of rows that ask for nothing."""
        none = torch.full((num_rows,), -1, dtype=torch.int32, device=self._device)
        state = self._state
        return LogitAdjustments(
            list_idx=none,
            **self._tables(slice(0)),
            penalty_idx=none,
            repetition=self._repetition,
            frequency=self._frequency,
            presence=self._presence,
            prompt_mask=state.prompt_bin_mask[:0],
            output_counts=state.output_bin_counts[:0],
            mask_idx=none,
            masks=self._token_masks.masks[:0],
            pin=none,
        )

    def _read(self, list_idx: Tensor, lists: tuple[int, ...]) -> dict[str, Tensor]:
        """Fields of :class:`LogitAdjustments` for rows with lists.

        Args:
            list_idx: [num_rows], int32, into all lists.
            lists: Those among them; the host knows which.
        """
        if self._device.type != "cpu":
            return {"list_idx": list_idx, **self._tables(slice(None))}
        # PyTorch goes through every list of a table, so it gets those that are read.
        some = torch.tensor(lists, dtype=torch.int64)
        place = torch.full((len(self._lists.others) + 1,), -1, dtype=torch.int32)
        place[some] = torch.arange(len(lists), dtype=torch.int32)
        return {"list_idx": place[list_idx.long()], **self._tables(some)}

    def _tables(self, some: slice | Tensor) -> dict[str, Tensor]:
        """Lists as fields of :class:`LogitAdjustments`."""
        ids, offsets, others = (table[some] for table in self._lists)
        return {"listed_ids": ids, "listed_offsets": offsets, "other_offsets": others}
