"""Groups of reads that wait for one another, and are scheduled in one pass.

With a prefix cache they compute the shared part of their prompts once: a block can be found as soon
as it is scheduled, and a pass writes all keys and values of a layer before it reads them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from vllm.v1.request import Request

from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.scheduling.feature import SchedulerFeature

# Seconds that reads of a group wait for the next one, which may never arrive if it was refused.
PATIENCE = 0.1


@dataclass
class _Group:
    missing: int
    deadline: float
    members: set[str] = field(default_factory=set)


class ReadGroups(SchedulerFeature):
    """Feature that holds reads back until their group is complete or its deadline has passed."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}

    def add_request(self, request: Request) -> None:
        asked = arguments_of(request.sampling_params).read_group
        if asked is None:
            return
        now = time.monotonic()
        group = self._groups.setdefault(asked.name, _Group(asked.num_reads, now + PATIENCE))
        if now < group.deadline:
            group.deadline = now + PATIENCE
        group.missing -= 1
        group.members.add(request.request_id)
        self._group_of[request.request_id] = asked.name

    def holds(self, request_id: str) -> bool:
        """Return true if the request still waits for others."""
        name = self._group_of.get(request_id)
        if name is None:
            return False
        group = self._groups[name]
        return group.missing > 0 and time.monotonic() < group.deadline

    def remove_request(self, request_id: str) -> None:
        name = self._group_of.pop(request_id, None)
        if name is not None:
            group = self._groups[name]
            group.members.discard(request_id)
            if not group.members:
                del self._groups[name]
