"""The order in which tiles of the vocabulary are projected and taken, and on which stream of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# A tile's ids -> its logits.
Project = Callable[[slice], Tensor]
# What becomes of a tile: its ids and its logits, which are lost afterwards.
Take = Callable[[slice, Tensor], None]
Walk = Callable[[Iterable[slice], Project, Take], None]


def one_by_one(tiles: Iterable[slice], project: Project, take: Take) -> None:
    """Take each tile before the next is projected."""
    for tile in tiles:
        take(tile, project(tile))


def one_ahead(
    tiles: Iterable[slice], project: Project, take: Take, streams: Any = torch.cuda
) -> None:
    """Each tile is projected on a second stream, beside the taking of the one before.

    The second stream begins with what the current one has done so far and ends before it goes on, so
    that a graph can be captured of it. Logits are allocated on the second stream, and given back to it
    when it waits for whoever read them: no two tiles that are in use share memory, and three never are.

    Args:
        tiles: In order.
        project: Called on the second stream.
        take: Called on the current one.
        streams: What has streams; another in tests.
    """
    current, second = streams.current_stream(), _second_stream(streams)
    second.wait_stream(current)

    def projected(tile: slice) -> tuple[slice, Tensor, Any]:
        with streams.stream(second):
            logits = project(tile)
            return tile, logits, second.record_event()

    waiting = iter(tiles)
    ahead = [projected(tile) for tile in _next(waiting)]
    while ahead:
        tile, logits, is_projected = ahead.pop()
        ahead = [projected(following) for following in _next(waiting)]
        current.wait_event(is_projected)
        take(tile, logits)
        second.wait_event(current.record_event())
        del logits
    # A capture ends with nothing left over on another stream.
    current.wait_stream(second)


@functools.cache
def _second_stream(streams: Any) -> Any:
    """One for the whole process: libraries keep a workspace for each stream they have seen."""
    return streams.Stream()


def _next(tiles: Any) -> list[slice]:
    """The next one, or none."""
    return [tile for tile in [next(tiles, None)] if tile is not None]
