"""What each pass of a canvas does, decided once when a server starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_diffusion.decoding.ways import Way


@dataclass(frozen=True)
class PassOrder:
    """What the passes of a canvas do, which scheduler, model state and step read.

    A canvas takes its denoise steps, one a pass. After the last one its tokens are *emitted*: they
    go to the engine. Before another canvas can follow, its rows are *encoded*: they run as known
    tokens, which writes their final keys and values. A pass of its own that does so and emits the
    canvas is its *commit*.

    Attributes:
        commits: A canvas is emitted by a commit. Otherwise the step that converges emits it, and
            its tokens are encoded like a prompt's. There is a commit in the asynchronous order,
            which schedules the next pass before it is known whether a step converged, unless that
            pass runs the same rows anyhow; where that pass verifies a draft; and where a last step
            may itself leave final keys and values, and then takes the commit's place.
        commit_encodes: The commit encodes the canvas. Without it, no row of a canvas runs as a
            known token.
        prompt_with_step: The end of a prompt and the first step of its canvas share a pass. Not
            where a canvas begins with a token that the pass over the prompt draws, nor with back
            ends of vLLM's, which have one flag for all rows of a sequence: causal or not.
        encode_with_step: The encode of an emitted canvas and the first step of the next one share a
            pass, so that a canvas of N steps takes N passes. Not where ``prompt_with_step`` cannot
            be, nor where the canvas is known to have converged too late or may leave nothing to
            encode.
    """

    commits: bool
    commit_encodes: bool
    prompt_with_step: bool
    encode_with_step: bool

    @classmethod
    def of(cls, way: Way, *, is_async: bool, own_attention: bool) -> PassOrder:
        """Derive the order.

        Args:
            way: The way of the request whose canvas it is.
            is_async: Passes are scheduled before the last one's output is known.
            own_attention: This package's back end attends, and not one of vLLM's.
        """
        needs_commit = is_async and not way.layout.recomputes
        commits = needs_commit or way.rule.can_finish_kv or way.layout.verifies
        shares = own_attention and not way.layout.draws_first_token
        return cls(
            commits=commits,
            commit_encodes=commits and not way.rule.can_finish_kv,
            prompt_with_step=shares,
            encode_with_step=shares and not is_async and not way.rule.can_finish_kv,
        )
