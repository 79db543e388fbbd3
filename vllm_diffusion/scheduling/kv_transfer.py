"""Transfer of requests whose prompt one engine prefills and whose canvases another denoises.

vLLM's connectors carry blocks of the cache from engine to engine, or to a store, and take computed
tokens as final. The computed rows of a canvas that is being denoised are not: they hold noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.hooks.replacement import replaces
from vllm_diffusion.requests.bounds import reads_by_nixl, transfer_agreement_problem
from vllm_diffusion.scheduling.features import SchedulerFeature


@replaces(
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens",
    reason="A connector would count tokens as loaded that the other engine has not prefilled.",
    until="The scheduler may cap what a connector loads of a request.",
)
def _matched_in_blocks(matched: Callable[..., Any], transfer: KVTransfer) -> Callable[..., Any]:
    def count(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A connector's count of what it loads, without what the other engine has not prefilled."""
        num_loaded, is_async = matched(request, num_computed_tokens)
        params = request.kv_transfer_params
        if num_loaded and params and params.get("do_remote_prefill"):
            most = transfer.num_final(request.num_prompt_tokens) - num_computed_tokens
            num_loaded = max(0, min(num_loaded, most))
        return num_loaded, is_async and num_loaded != 0

    return count


class KVTransfer(SchedulerFeature):
    """Feature that limits a connector to final keys and values; it does nothing without one."""

    def __init__(self, scheduler: Scheduler, spec: CanvasSpec) -> None:
        """Join a scheduler's connector.

        Args:
            scheduler: Scheduler of the requests.
            spec: Description of canvases.
        """
        self._scheduler = scheduler
        self._spec = spec
        # Prefill-only requests whose prompt fills no block, so that none of it is final.
        self._without_blocks: set[str] = set()
        if scheduler.connector is not None:
            _matched_in_blocks.install_on(scheduler.connector, self)

    def num_final(self, num_known: int) -> int:
        """Return the number of ``num_known`` tokens that are prefilled; the rest begin a canvas."""
        return num_known - self._spec.num_given(num_known)

    def is_prefilled_only(self, request: Request) -> bool:
        """Return true if the request ends with its prompt, since another engine answers it.

        Its client sets this, or asks a prefill engine for a single token, as clients of models do
        that cannot answer without a token.
        """
        if self._scheduler.connector is None:
            return False
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            return True
        role = self._scheduler.vllm_config.kv_transfer_config.kv_role
        return role == "kv_producer" and request.max_tokens == 1

    def prepare(self, request: Request) -> str | None:
        """Prepare a request for the stock scheduler.

        Returns:
            The reason why its prompt does not match the blocks to load, at which connectors would
            end the engine; ``None`` if it does.
        """
        problem = self._transfer_problem(request)
        if problem:
            request.kv_transfer_params = None
        if self.is_prefilled_only(request):
            # The end of its prompt, which fills no block, is left to the engine that denoises.
            num_final = self.num_final(request.num_prompt_tokens)
            if num_final == 0:
                self._without_blocks.add(request.request_id)
            else:
                del request.prompt_token_ids[num_final:]
                del request._all_token_ids[num_final:]
                request.num_prompt_tokens = num_final
        return problem

    def _transfer_problem(self, request: Request) -> str | None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        if not reads_by_nixl(self._scheduler.vllm_config.kv_transfer_config):
            return None
        return transfer_agreement_problem(
            params,
            num_prefilled=self.num_final(request.num_prompt_tokens),
            num_groups=len(self._scheduler.kv_cache_config.transfer_groups),
            loading=(
                (other.kv_transfer_params or {}).get("remote_request_id")
                for other in self._scheduler.requests.values()
            ),
        )

    def end_prefilled(
        self, scheduler_output: SchedulerOutput, outputs: dict[int, EngineCoreOutputs]
    ) -> None:
        """End requests whose prompt's last pass has returned, with their connector's parameters.

        Args:
            scheduler_output: Scheduled pass.
            outputs: Outputs of the pass by API process; added to.
        """
        scheduler = self._scheduler
        if scheduler.connector is None:
            return
        ended = [
            request
            for request_id in (*scheduler_output.num_scheduled_tokens, *self._without_blocks)
            if (request := scheduler.requests.get(request_id)) is not None
            and not request.is_finished()
            and self._is_prefilled(request)
        ]
        for request in ended:
            stats = request.take_prefill_stats()
            if stats is not None:
                stats.finalize(scheduler.kv_cache_manager.estimate_cached_tokens(request))
            params = self._finish_prefilled(request)
            if stats is not None and params is not None:
                # The other engine reports them in this request's usage.
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
        """End the request; return the other engine's parameters, ``None`` if it has nothing to load."""
        status = RequestStatus.FINISHED_LENGTH_CAPPED
        if request.request_id in self._without_blocks:
            self._scheduler.finish_requests(request.request_id, status)
            return None
        request.status = status
        self._scheduler.running.remove(request)
        params, _ = self._scheduler._free_request(request)
        return params

    def offer_final(self, request: Request) -> None:
        """Limit a finished request to final keys and values, which its connector takes.

        The rows of a canvas in flight are noise, and so are those of an answer's last canvas that
        is not encoded. Some connectors go by computed tokens, and some by blocks that have a hash.
        """
        if self._scheduler.connector is None:
            return
        num_final = request.num_computed_tokens - request.num_in_flight_tokens
        request.num_computed_tokens = max(0, min(num_final, request.num_tokens))
        hash_block_size = self._scheduler.hash_block_size
        del request.block_hashes[request.num_computed_tokens // hash_block_size :]

    def remove_request(self, request_id: str) -> None:
        self._without_blocks.discard(request_id)
