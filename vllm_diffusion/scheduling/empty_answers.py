"""Answers without a token before their end: counted, reported once and, with ``never_empty``,
prevented.

To prevent them a request gets what clients have for it: a ``min_tokens`` of 1 and, where the server
knows what ends a thought, bad words of that end with an end token after it.
"""

import copy
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.metrics import EngineCounts
from vllm_diffusion.requests.arguments import arguments_of, end_token_ids
from vllm_diffusion.scheduling.features import SchedulerFeature
from vllm_diffusion.startup.plugin_settings import OPTION

logger = init_logger(f"vllm.{__name__}")
# So many empty answers, and this share of all, are reported.
LEAST_EMPTY, LARGEST_SHARE = 5, 0.05


class EmptyAnswers(SchedulerFeature):
    """Feature that counts empty answers or, if the operator wishes, has none begin with its end."""

    def __init__(
        self, scheduler: Scheduler, spec: CanvasSpec, counters: EngineCounts, *, never_empty: bool
    ) -> None:
        """Start without requests, with the operator's setting ``never_empty``."""
        marks: Any = scheduler.vllm_config.reasoning_config
        ids = marks.natural_reasoning_end_token_ids if marks is not None else None
        self._thought_end = list(ids or ())
        self._spec = spec
        self._counters = counters
        self._never_empty = never_empty
        self._requests: dict[str, Request] = {}
        self._num_answers = self._num_empty = 0
        self._has_warned = never_empty

    def add_request(self, request: Request) -> None:
        params = request.sampling_params
        assert params is not None
        arguments, ends = arguments_of(params), end_token_ids(params)
        if arguments.read_only or not ends:
            return
        self._requests[request.request_id] = request
        # What a request prescribes for its beginning may be an end.
        if (
            not self._never_empty
            or params.structured_outputs is not None
            or arguments.pinned
            or arguments.allowed_ids is not None
            or set(ends).issuperset(params.allowed_token_ids or (None,))
        ):
            return
        # Several answers to one prompt may share their parameters.
        request.sampling_params = params = copy.copy(params)
        params.min_tokens = max(params.min_tokens, 1)
        # Verified drafts have no bad words.
        refused = self._spec.ways[arguments.way].refused_fields
        if self._thought_end and "bad_words" not in refused:
            words = [[*self._thought_end, end] for end in ends]
            params._bad_words_token_ids = [*(params.bad_words_token_ids or ()), *words]

    def remove_request(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None or not request.output_token_ids:
            return
        *said, last = request.output_token_ids
        width = len(self._thought_end)
        is_empty = last in end_token_ids(request.sampling_params) and (
            not said or (width > 0 and said[-width:] == self._thought_end)
        )
        self._num_answers += 1
        if not is_empty:
            return
        self._num_empty += 1
        self._counters.observe_empty_answer(request)
        most = max(LEAST_EMPTY, LARGEST_SHARE * self._num_answers)
        if self._num_empty >= most and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d of %d answers were empty: the model ended them with their first token, as it may where a prompt "
                "asks for the result alone. %s forbids that, and so does min_tokens=1 in a request.",
                *(self._num_empty, self._num_answers, OPTION.replace("...", '"never_empty": true')),
            )
