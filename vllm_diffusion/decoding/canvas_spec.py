"""What a family says of its canvases, and what holds where a request says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_diffusion.decoding.rule import DecodingRule
from vllm_diffusion.decoding.statistics import SlotStatistics
from vllm_diffusion.layouts import CanvasLayout


@dataclass(frozen=True)
class CanvasSpec:
    """Chosen at start-up, and known to the API process, the scheduler and the workers.

    Attributes:
        layout: How canvases lie in a sequence.
        rule: What to keep of a canvas, and when it is done.
        max_denoising_steps: N, the step cap, also the most that a request may ask for.
        settings: The rule's, by name.
        mask_token_id: What fills undecided positions; ``None`` for uniformly random tokens. It is
            never drawn in a canvas.
    """

    layout: CanvasLayout
    rule: DecodingRule
    max_denoising_steps: int
    settings: Mapping[str, float | str]
    mask_token_id: int | None = None

    @property
    def length(self) -> int:
        """C, positions that are denoised together."""
        return self.layout.length

    def num_given(self, num_known: int) -> int:
        """Leading positions of the canvas behind ``num_known`` known tokens that are known too."""
        return self.layout.num_given(num_known)

    @property
    def never_drawn(self) -> tuple[int, ...]:
        """Token ids that no position draws; what verifies draws whatever the model says."""
        if self.mask_token_id is None or self.layout.verifies:
            return ()
        return (self.mask_token_id,)

    def refused_fields(self) -> dict[str, str]:
        """Request fields that this model cannot honour, each with the reason and the remedy."""
        return {**self.layout.refused_fields, **self.rule.refused_fields}

    def converges_at_end(self, is_asked: bool) -> bool:
        """Whether a canvas is judged by its positions up to its first end token only.

        Args:
            is_asked: The server's ``converge_at_end``.
        """
        return is_asked or self.rule.judges_to_end

    def statistics(self, num_slots: int, device: torch.device) -> SlotStatistics:
        """Allocate the statistics that the rule decides from.

        Args:
            num_slots: R.
            device: Where the tensors are.
        """
        return SlotStatistics.zeros(num_slots, self.length, self.rule.num_choices, device)

    # The order of passes.

    def commits_in_place(self, is_async: bool) -> bool:
        """Whether a canvas is emitted by the pass that makes its keys and values final.

        Otherwise the step that converges emits it, and it is encoded as known tokens are.

        Args:
            is_async: Whether passes are scheduled before the last one's output is known.
        """
        return is_async or self.rule.can_finish_kv or self.layout.verifies

    def emits_by_encoding(self, is_async: bool) -> bool:
        """Whether the pass that emits a canvas runs its rows as known tokens."""
        return self.commits_in_place(is_async) and not self.rule.can_finish_kv

    def extra_async_passes(self) -> int:
        """Passes of a canvas that the asynchronous order takes beyond those of the synchronous one.

        A canvas that begins with a token of the encoding pass, and one whose last step mostly leaves
        final keys and values, take as many in both.
        """
        return 0 if self.layout.starts_from_commit or self.rule.can_finish_kv else 1

    def why_prompt_apart(self) -> str | None:
        """Why the end of a prompt and the canvas behind it share no pass; ``None`` if they may."""
        if self.layout.starts_from_commit:
            return "this model's canvases begin with a token that the encoding pass gives"
        return None

    def why_encoded_apart(self, is_async: bool) -> str | None:
        """Why a finished canvas and the one behind it share no pass; ``None`` if they may."""
        if self.layout.starts_from_commit:
            return self.why_prompt_apart()
        if is_async:
            return "--async-scheduling does not know in time which step converges"
        if self.rule.can_finish_kv:
            return "this model's last step mostly leaves nothing to encode"
        return None
