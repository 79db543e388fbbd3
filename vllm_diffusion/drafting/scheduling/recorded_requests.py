"""Scheduler mixin that records the tokens of finished requests."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.drafting.draft_settings import draft_settings, recording_ring
from vllm_diffusion.drafting.recording import Recorder, wants_recording

logger = init_logger(f"vllm.{__name__}")


class RecordingMixin(Scheduler):
    """Recording of each finished request that may be recorded and can be replayed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = draft_settings(self.vllm_config).record
        assert settings is not None
        index = self.vllm_config.parallel_config.data_parallel_index
        self.recorder = Recorder(recording_ring(settings, index), logger.warning)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Record a request, then free it as vLLM does.

        vLLM calls this once for each request: finished, aborted, or ended by a stop string, which
        is an abort here. The answer of an aborted request is the target's own too.
        """
        if _is_recordable(request):
            self.recorder.add(request.prompt_token_ids, list(request.output_token_ids))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """Write pending exchanges, then shut down as vLLM does."""
        self.recorder.close()
        super().shutdown()


def _is_recordable(request: Request) -> bool:
    """Return true if the target read a request's token ids and nothing else."""
    params = request.sampling_params
    return bool(
        params is not None
        and request.num_output_tokens
        and request.prompt_token_ids
        and request.prompt_embeds is None
        and not request.mm_features
        and request.lora_request is None
        and not request.resumable
        and wants_recording(params.extra_args)
    )
