"""What a family says of its canvases, and what holds where a request says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_diffusion.decoding.rule import DecodingRule


@dataclass(frozen=True)
class CanvasSpec:
    """Chosen at start-up, and known at the door, in the scheduler and in the workers.

    Attributes:
        length: C, positions that are denoised together.
        rule: What to keep of a canvas, and when it is done.
        max_denoising_steps: N, the step cap, also the most that a request may ask for.
        settings: The rule's, by name.
        mask_token_id: What fills undecided positions; ``None`` for uniformly random tokens. It is
            never drawn.
        is_aligned: Whether canvases are blocks counted from position 0 of the sequence, so that the
            first one begins with the end of the prompt; otherwise one begins where the known tokens
            end.
        is_block_causal: Whether known tokens attend in both directions within their block, as those
            of a canvas do, instead of causally.
        is_seeded: Whether the pass that writes the known tokens' keys and values also gives the first
            token of the canvas behind them.
        seeds_greedily: Whether that token is the likeliest at any temperature.
        is_shifted: Whether the row of a position says what stands at the next one.
    """

    length: int
    rule: DecodingRule
    max_denoising_steps: int
    settings: Mapping[str, float | str]
    mask_token_id: int | None = None
    is_aligned: bool = False
    is_block_causal: bool = False
    is_seeded: bool = False
    seeds_greedily: bool = False
    is_shifted: bool = False

    def __post_init__(self) -> None:
        if self.rule.commit_verifies:
            # Its rows are causal, and what the last one kept draws begins the next canvas.
            assert self.is_seeded
            assert not any((self.is_aligned, self.is_block_causal, self.is_shifted))

    def num_given(self, num_known: int) -> int:
        """Leading positions of the canvas behind ``num_known`` known tokens that are known too."""
        return num_known % self.length if self.is_aligned else 0
