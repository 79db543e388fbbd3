"""vLLM's schedulers, noting the tokens of the requests that end."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.drafting.draft_settings import draft_settings, recording_ring
from vllm_diffusion.drafting.recording import Recorder, wants_recording

logger = init_logger(f"vllm.{__name__}")


class RecordingMixin(Scheduler):
    """Hands each request that ends to a recorder, if it may be recorded and replayed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = draft_settings(self.vllm_config).record
        assert settings is not None
        index = self.vllm_config.parallel_config.data_parallel_index
        self.recorder = Recorder(recording_ring(settings, index), logger.warning)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, once for each request: stopped, aborted, or ended by a stop string, which is an
        abort here. What an aborted one has said is the target's own too."""
        if _is_recordable(request):
            self.recorder.add(request.prompt_token_ids, list(request.output_token_ids))
        return super()._free_request(request, *args, **kwargs)

    def shutdown(self) -> None:
        """As vLLM's, and write what is not written yet."""
        self.recorder.close()
        super().shutdown()


def _is_recordable(request: Request) -> bool:
    """Whether its token ids, and nothing else, are what the target read."""
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
