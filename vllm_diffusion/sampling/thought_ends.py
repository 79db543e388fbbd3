"""The token that ends a thought, made likelier as an answer grows: iLLaDA's
``end_think_logit_boost``.

At the first mask of the block, the logit of the token that goes on with the end of a thought
(``</think>``) grows by ``boost * (tokens so far / max_tokens) ** power``, until the answer has that
end.

Source: ``apply_end_think_logit_boost`` of the publisher's ``generate.py``, as found in a public
copy.
"""

import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.requests.arguments import MOST_THOUGHT_END


class ThoughtEnds:
    """The boosted logit of each slot; R is the number of slots.

    Attributes:
        position: [R], int64, position in the sequence; -1 where no logit is boosted.
        token: [R], int64.
        offset: [R], float32.
    """

    def __init__(self, slots: CanvasSlots) -> None:
        """Allocate for all slots."""
        R, device = slots.num_slots, slots.device
        self._slots = slots
        self._owned: dict[int, tuple[int, ...]] = {}
        # For each slot the number of tokens, the prompt's length, ``max_tokens``, and the tokens.
        self._held = torch.zeros(R, 3 + MOST_THOUGHT_END, dtype=torch.int64, device=device)
        self.position = torch.full((R,), -1, dtype=torch.int64, device=device)
        self.token = torch.zeros(R, dtype=torch.int64, device=device)
        self.offset = torch.zeros(R, device=device)

    @property
    def is_used(self) -> bool:
        """True if a request has the end of its thought boosted."""
        return bool(self._owned)

    def add_request(self, slot: int, tokens: tuple[int, ...], num_prompt: int, total: int) -> None:
        """Take a new owner of a slot.

        Args:
            slot: The slot.
            tokens: That end a thought, 1 to :data:`MOST_THOUGHT_END`.
            num_prompt: Tokens of the prompt.
            total: Tokens of the answer at most.
        """
        row = (len(tokens), num_prompt, total, *tokens)
        self._owned[slot] = tokens
        padded = torch.tensor([*row, *[-1] * (self._held.shape[1] - len(row))])
        self._held[slot] = async_tensor_h2d(padded.numpy(), device=self._held.device)

    def remove_request(self, slot: int) -> None:
        """Forget a slot's owner."""
        if self._owned.pop(slot, None):
            self._held[slot] = 0

    def update(self) -> None:
        """Find the logits of the pass, from the canvases before it."""
        slots = self._slots
        canvas, settings = slots.canvas, slots.requested.settings
        count, num_prompt, total = self._held[:, :3].unbind(-1)
        tokens, most = self._held[:, 3:], max(map(len, self._owned.values()))
        at = torch.arange(canvas.shape[1], device=canvas.device)
        start, end = slots.num_given[:, None], (slots.num_given + settings["block_length"])[:, None]
        masked = (canvas == slots.spec.mask_token_id) & (at >= start) & (at < end)
        position = masked.int().argmax(dim=-1)

        token, is_written = tokens[:, 0], (at >= num_prompt[:, None]) & (at + count[:, None] <= end)
        for i in range(most):
            within = i < count
            is_written &= (canvas.roll(-i, dims=1) == tokens[:, i, None]) | ~within[:, None]
            if i > 0:
                # The i tokens before the position are the first i of the end.
                before = torch.stack([self._before(position, k) for k in range(i, 0, -1)], dim=-1)
                matches = (before == tokens[:, :i]).all(dim=-1) & (position - num_prompt >= i)
                token = torch.where(matches & within, tokens[:, i], token)
        is_boosted = (count > 0) & masked.any(dim=-1) & ~is_written.any(dim=-1)
        progress = ((position - num_prompt + 1) / total.clamp(min=1)).clamp(0, 1)
        self.position.copy_(torch.where(is_boosted, position, -1))
        self.token.copy_(token)
        self.offset.copy_(
            settings["end_think_logit_boost"] * progress ** settings["end_think_boost_power"]
        )

    def _before(self, position: Tensor, distance: int) -> Tensor:
        """[R]: the token that stands so many places before a position of each canvas."""
        at = (position - distance).clamp(min=0)[:, None]
        return self._slots.canvas.gather(-1, at)[:, 0]
