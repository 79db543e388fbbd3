"""The facts of an answer that its frames imply, computed from the frames alone."""

from collections.abc import Sequence
from typing import Any

from vllm_diffusion.live import CanvasFrame, CanvasStepMap, watch

EVERY_FIELD = {
    "diffusion_frames": 1,
    "diffusion_frame_fields": ["token_ids", "kept", "entropy"],
    "diffusion_step_map": True,
    "diffusion_trace": True,
}


class Watched:
    """A call's events, by answer.

    Attributes:
        frames: By (prompt, choice), in order.
        step_maps: Likewise.
        outputs: Finished ``RequestOutput`` of each prompt.
    """

    def __init__(self, llm: Any, prompts: Sequence[list[int]], params: Sequence[Any]) -> None:
        self.frames: dict[tuple[int, int], list[CanvasFrame]] = {}
        self.step_maps: dict[tuple[int, int], list[CanvasStepMap]] = {}
        outputs: dict[int, Any] = {}
        tokens = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for event in watch(llm, lambda: llm.enqueue(tokens, list(params), use_tqdm=False)):
            if isinstance(event, CanvasFrame):
                key = (event.prompt_index, event.index)
                self.frames.setdefault(key, []).append(event)
            elif isinstance(event, CanvasStepMap):
                key = (event.prompt_index, event.index)
                self.step_maps.setdefault(key, []).append(event)
            else:
                outputs[int(event.request_id)] = event
        self.outputs = [outputs[request_id] for request_id in sorted(outputs)]

    def canvases(self, prompt: int, choice: int = 0) -> list[list[CanvasFrame]]:
        """Return the frames of each canvas of an answer, without those of lost canvases."""
        canvases: dict[int, list[CanvasFrame]] = {}
        for frame in self.frames.get((prompt, choice), []):
            if frame.begins_anew:
                canvases[frame.block] = []
            canvases.setdefault(frame.block, []).append(frame)
        assert list(canvases) == list(range(len(canvases)))
        return list(canvases.values())


def steps_that_decided(
    canvases: list[list[CanvasFrame]], *, has_mask: bool, first_token_length: int | None = None
) -> list[int]:
    """The step that decided each token, as a reader of the frames sees it.

    With a mask: when it was kept first, or changed last after that. Without: when it changed last.

    Args:
        canvases: Frames of each step of each.
        has_mask: Whether the model has a mask token.
        first_token_length: Of canvases whose first token was known before, where there are such.
    """
    result: list[int] = []
    for frames in canvases:
        assert [frame.step for frame in frames] == list(range(1, len(frames) + 1))
        assert all(frame.token_ids and frame.kept for frame in frames)
        decided = [0] * len(frames[0].token_ids or ())
        for before, frame in zip([None, *frames], frames, strict=False):
            for i, token in enumerate(frame.token_ids or ()):
                changed = before is None or before.token_ids[i] != token
                was_kept = before is not None and before.kept[i]
                if changed or (has_mask and not was_kept):
                    decided[i] = frame.step
        if len(decided) == first_token_length:
            decided[0] = 0
        result += decided
    return result


def steps_of_trace(trace: list[list[list[int]]], num_given: int) -> list[int]:
    """The step that decided each token of a model with a mask: the last that changed it.

    Args:
        trace: Of an answer.
        num_given: Known tokens that its first canvas begins with.
    """
    result: list[int] = []
    for rows in trace:
        decided = [0] * len(rows[0])
        for step, (before, after) in enumerate(zip(rows, rows[1:], strict=False), 1):
            decided = [
                step if old != new else last
                for old, new, last in zip(before, after, decided, strict=True)
            ]
        result += decided
    return result[num_given:]
