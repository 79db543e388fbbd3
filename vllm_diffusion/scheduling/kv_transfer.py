"""Requests whose prompt is prefilled by one engine and whose canvases are denoised by another.

vLLM's connectors carry blocks of the cache from engine to engine, or to a store, and take what is
computed for what is final. Of a canvas that is being denoised that is not so: its rows are noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.outputs import RequestError
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.replacement import replace
from vllm_diffusion.requests.transfer_params import agreement_problem, reads_by_nixl


class KVTransferMixin(Scheduler):
    """Placed before a stock scheduler; without a connector it does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Requests that end with a prompt of which nothing is final before its canvas is.
        self._without_blocks: set[str] = set()
        if self.connector is not None:
            replace(self.connector, "get_num_new_matched_tokens", self._matched_in_blocks)

    def _num_final(self, num_known: int) -> int:
        """Tokens of so many known ones that are prefilled; the others are given ones of a canvas."""
        spec: CanvasSpec = self.vllm_config.model_config.canvas_spec
        return num_known - spec.num_given(num_known)

    def is_prefilled_only(self, request: Request) -> bool:
        """Whether the request ends with its prompt, since another engine writes its answer.

        Its client says so, or asks an engine that is there to prefill for a single token, as clients
        of models do that cannot answer with none.
        """
        if self.connector is None:
            return False
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            return True
        role = self.vllm_config.kv_transfer_config.kv_role
        return role == "kv_producer" and request.max_tokens == 1

    def add_request(self, request: Request) -> None:
        """Refuse one whose prompt cannot be what it is to load: connectors end the engine at it."""
        if problem := self._transfer_problem(request):
            request.kv_transfer_params = None
        if self.is_prefilled_only(request):
            self._cut_to_blocks(request)
        super().add_request(request)
        if problem:
            # Stock's way to refuse a request that it has taken.
            error = RequestError("validation_error", problem)
            self.grammar_compile_error_reqs[request.request_id] = error

    def _cut_to_blocks(self, request: Request) -> None:
        """Leave the end of its prompt, which fills no block, to the engine that denoises it."""
        num_final = self._num_final(request.num_prompt_tokens)
        if num_final == 0:
            self._without_blocks.add(request.request_id)
        else:
            del request.prompt_token_ids[num_final:]
            del request._all_token_ids[num_final:]
            request.num_prompt_tokens = num_final

    def _matched_in_blocks(self, matched: Callable[..., Any]) -> Callable[..., Any]:
        """A connector's count of what it loads, without what the other engine has not prefilled."""

        def count(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
            num_loaded, is_async = matched(request, num_computed_tokens)
            params = request.kv_transfer_params
            if num_loaded and params and params.get("do_remote_prefill"):
                most = self._num_final(request.num_prompt_tokens) - num_computed_tokens
                num_loaded = max(0, min(num_loaded, most))
            return num_loaded, is_async and num_loaded != 0

        return count

    def _transfer_problem(self, request: Request) -> str | None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        if not reads_by_nixl(self.vllm_config.kv_transfer_config):
            return None
        return agreement_problem(
            params,
            num_prefilled=self._num_final(request.num_prompt_tokens),
            num_groups=len(self.kv_cache_config.transfer_groups),
            loading=(
                (other.kv_transfer_params or {}).get("remote_request_id")
                for other in self.requests.values()
            ),
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.connector is not None:
            self._end_prefilled(scheduler_output, outputs)
        return outputs

    def _end_prefilled(
        self, scheduler_output: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """End requests whose prompt's last pass came back, with what their connector says of it."""
        ended = [
            request
            for request_id in (*scheduler_output.num_scheduled_tokens, *self._without_blocks)
            if (request := self.requests.get(request_id)) is not None
            and not request.is_finished()
            and self._is_prefilled(request)
        ]
        for request in ended:
            stats = request.take_prefill_stats()
            if stats is not None:
                stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
            params = self._finish_prefilled(request)
            if stats is not None and params is not None:
                # The other engine reports them as this request's.
                params["remote_prefill_cached_tokens"] = stats.num_cached_tokens
            told = outputs.setdefault(request.client_index, EngineCoreOutputs())
            told.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    prefill_stats=stats,
                    kv_transfer_params=params,
                )
            )

    def _is_prefilled(self, request: Request) -> bool:
        if request.request_id in self._without_blocks:
            return True
        num_computed = request.num_computed_tokens - request.num_in_flight_tokens
        is_running = request.status == RequestStatus.RUNNING
        return is_running and num_computed >= request.num_tokens and self.is_prefilled_only(request)

    def _finish_prefilled(self, request: Request) -> dict[str, Any] | None:
        """What the other engine has to be told; ``None`` where there is nothing to load."""
        status = RequestStatus.FINISHED_LENGTH_CAPPED
        if request.request_id in self._without_blocks:
            self.finish_requests(request.request_id, status)
            return None
        request.status = status
        self.running.remove(request)
        params, _ = self._free_request(request)
        return params

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._without_blocks.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        super()._update_waiting_for_remote_kv(request)
        # Stock computes the last token here in any case, which begins no block.
        request.num_computed_tokens = self._num_final(request.num_computed_tokens)

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Offer the connector nothing but final keys and values.

        Those of a canvas in flight are noise, and so are those of an answer's last canvas where none
        follows that it would be encoded with. Some connectors go by computed tokens, and some by
        blocks that have a hash.
        """
        if self.connector is not None:
            num_final = request.num_computed_tokens - request.num_in_flight_tokens
            request.num_computed_tokens = max(0, min(num_final, request.num_tokens))
            del request.block_hashes[request.num_computed_tokens // self.hash_block_size :]
        return super()._connector_finished(request)
