"""Texts that requests expect their answers to resemble, from which their canvases start in place of
noise.

A canvas starts from the part of its request's text that follows what was emitted last: the
continuation of the longest run of tokens that ends with the last one emitted, and of equal runs of
the one nearest to where the canvas before it would go on. Without such a run it starts from noise.
A canvas that kept less than half of what it started from is a miss, and after ``MOST_MISSES`` the
text is dropped: that a canvas was slow would depend on other requests, what it kept depends on its
own.

The workers search on the device, in passes of servers that have such a request, since with
asynchronous scheduling the next pass is on its way before the host knows what was emitted. The API
process repeats the search to count tokens.

n is a number of requests, K is ``LONGEST_RUN``, L the length of the longest text, C the canvas
length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffusion.requests.arguments import MOST_PREDICTED

# Tokens of the runs that are told apart by their lengths, and of those that are too short to be no
# chance.
LONGEST_RUN, LEAST_RUN = 16, 3
MOST_MISSES = 2
# No token, in a text and before the first one emitted. They differ, so that neither matches the
# other.
_NO_TOKEN, _NOTHING_EMITTED = -1, -2


class Progress(NamedTuple):
    """Places of answers in their texts.

    Attributes:
        last: [n, K], int32, the tokens emitted last.
        place: [n], int64, where the canvas that is being denoised goes on in its text.
        starts: [n], bool, canvases that started from there; the others from noise.
        misses: [n], int32, canvases that kept less than half of what they started from.
    """

    last: Tensor
    place: Tensor
    starts: Tensor
    misses: Tensor

    @classmethod
    def first(cls, num: int) -> Progress:
        """Return the progress, on the host, of answers whose first canvas starts from the beginning
        of their texts.
        """
        arrays = (
            np.full((num, LONGEST_RUN), _NOTHING_EMITTED, dtype=np.int32),
            np.zeros(num, dtype=np.int64),
            np.ones(num, dtype=bool),
            np.zeros(num, dtype=np.int32),
        )
        return cls(*map(torch.from_numpy, arrays))


def padded(texts: Sequence[Sequence[int]]) -> Tensor:
    """[n, K + L], int32: texts with room for a run before each."""
    length = LONGEST_RUN + max(map(len, texts))
    rows = np.full((len(texts), length), _NO_TOKEN, dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[LONGEST_RUN : LONGEST_RUN + len(text)] = text
    return torch.from_numpy(rows)


def expected(progress: Progress, texts: Tensor, width: int) -> Tensor:
    """Return what canvases start from: [n, width], int32, -1 where that is noise.

    Args:
        progress: Of the answers.
        texts: See :func:`padded`.
        width: Positions of a canvas, from the first that is not a known token.
    """
    at = LONGEST_RUN + progress.place[:, None] + torch.arange(width, device=texts.device)
    tokens = texts.gather(-1, at.clamp(max=texts.shape[1] - 1))
    return torch.where((at < texts.shape[1]) & progress.starts[:, None], tokens, _NO_TOKEN)


def kept(
    progress: Progress, texts: Tensor, tokens: Tensor, num_emitted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many tokens of their texts canvases started from, and how many of these were
    emitted, both [n].

    Args:
        progress: Of the answers, before the canvases.
        texts: See :func:`padded`.
        tokens: [n, C], integer, of the canvases, from the first that is not a known token.
        num_emitted: [n], how many of them were emitted.
    """
    started_from = expected(progress, texts, tokens.shape[1])
    counts = torch.arange(tokens.shape[1], device=texts.device) < num_emitted[:, None]
    counts = counts & (started_from != _NO_TOKEN)
    return counts.sum(-1), (counts & (started_from == tokens)).sum(-1)


def advanced(progress: Progress, texts: Tensor, tokens: Tensor, num_emitted: Tensor) -> Progress:
    """Return the progress after canvases: see :func:`kept`. An answer of which nothing was emitted
    stays where it is.
    """
    emits = num_emitted > 0
    num_started, num_kept = kept(progress, texts, tokens, num_emitted)
    misses = progress.misses + (2 * num_kept < num_started).int()
    of_last = num_emitted[:, None] + torch.arange(LONGEST_RUN, device=texts.device)
    last = torch.cat([progress.last, tokens.int()], dim=1).gather(-1, of_last.long())
    # [n, L + 1, K]: the tokens before each position of the text.
    before = texts.unfold(1, LONGEST_RUN, 1)
    number = torch.arange(1, LONGEST_RUN + 1, dtype=torch.int8, device=texts.device)
    run = LONGEST_RUN - torch.where(before != last[:, None], number, 0).amax(-1).long()
    position = torch.arange(before.shape[1], device=texts.device)
    goes_on = progress.place + num_emitted
    distance = (position - goes_on[:, None]).abs().clamp(max=texts.shape[1])
    found = (run * (texts.shape[1] + 1) - distance).argmax(-1)
    is_found = run.gather(-1, found[:, None])[:, 0] >= LEAST_RUN
    return Progress(
        last,
        torch.where(emits, torch.where(is_found, found, goes_on), progress.place),
        torch.where(emits, is_found & (misses < MOST_MISSES), progress.starts),
        misses,
    )


class FollowedText:
    """One answer and its text, on the host.

    Attributes:
        accepted: Tokens of the text that canvases started from and emitted.
        rejected: Those that others took the place of.
    """

    def __init__(self, text: Sequence[int], *, is_prompt: bool) -> None:
        """Begin before the first canvas, which starts from noise where the text is the prompt
        itself.
        """
        self.texts = padded([text])
        progress = Progress.first(1)
        self.progress = progress._replace(starts=progress.starts & (not is_prompt))
        self.accepted = self.rejected = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow a canvas of which some tokens were emitted."""
        emitted, num = torch.tensor([list(tokens)]), torch.tensor([len(tokens)])
        num_started, num_kept = kept(self.progress, self.texts, emitted, num)
        self.accepted += int(num_kept)
        self.rejected += int(num_started - num_kept)
        self.progress = advanced(self.progress, self.texts, emitted, num)

    def begin(self, canvas: np.ndarray) -> None:
        """Put what the next canvas starts from into its positions [C], int64, which are noise."""
        start = expected(self.progress, self.texts, len(canvas))[0].numpy()
        canvas[:] = np.where(start == _NO_TOKEN, canvas, start)


class Predictions:
    """Texts of running requests and their progress, by slot, on the device once a request has
    brought one.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        """Allocate nothing yet, for ``num_slots`` requests."""
        self._num_slots = num_slots
        self._device = device
        self._lengths: dict[int, int] = {}
        self._texts: Tensor | None = None
        self._progress: Progress | None = None
        self._index: Tensor | None = None

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``."""
        if self._lengths.pop(slot, None) is not None:
            self._index = None

    def write(self, followed: dict[int, FollowedText]) -> None:
        """Take over new requests, by slot."""
        if self._texts is None or self._progress is None:
            length = LONGEST_RUN + MOST_PREDICTED
            self._texts = torch.empty(
                self._num_slots, length, dtype=torch.int32, device=self._device
            )
            self._progress = Progress(
                *(self._copied(each.numpy()) for each in Progress.first(self._num_slots))
            )
        self._index = None
        index = self._on_device(followed)
        for held, new in zip(
            self._progress,
            zip(*(text.progress for text in followed.values()), strict=True),
            strict=True,
        ):
            held[index] = self._copied(np.concatenate([each.numpy() for each in new]))
        rows = np.full((len(followed), self._texts.shape[1]), _NO_TOKEN, dtype=np.int32)
        for row, (slot, text) in zip(rows, followed.items(), strict=True):
            self._lengths[slot] = text.texts.shape[1]
            row[: text.texts.shape[1]] = text.texts[0].numpy()
        self._texts[index] = self._copied(rows)

    def apply(self, canvas: Tensor, tokens: Tensor, num_emitted: Tensor) -> None:
        """Begin the canvases after those that a pass emitted.

        Args:
            canvas: [R, C], int64, what the next pass starts from; changed in place.
            tokens: [R, C], int64, see :class:`StepOutput`.
            num_emitted: [R], int32.
        """
        # Most servers have no such request.
        if not self._lengths:
            return
        assert self._texts is not None
        assert self._progress is not None
        if self._index is None:
            self._index = self._on_device(self._lengths)
        index = self._index
        texts = self._texts[index, : max(self._lengths.values())]
        progress = Progress(*(held[index] for held in self._progress))
        progress = advanced(progress, texts, tokens[index], num_emitted[index])
        for held, new in zip(self._progress, progress, strict=True):
            held[index] = new
        start = expected(progress, texts, canvas.shape[1])
        begins = (num_emitted[index] > 0)[:, None] & (start != _NO_TOKEN)
        canvas[index] = torch.where(begins, start.long(), canvas[index])

    def _on_device(self, slots: Iterable[int]) -> Tensor:
        """[n], int64: slots, as an index."""
        return self._copied(np.array([*slots], dtype=np.int64))

    def _copied(self, array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, device=self._device)
