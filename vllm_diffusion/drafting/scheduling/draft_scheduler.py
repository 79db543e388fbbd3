"""Scheduler of an autoregressive target: vLLM's, with the features that its settings ask for."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_diffusion.drafting.draft_settings import draft_settings
from vllm_diffusion.drafting.scheduling.adaptive_drafts import AdaptiveDraftsMixin
from vllm_diffusion.drafting.scheduling.recorded_requests import RecordingMixin
from vllm_diffusion.startup.engine_process import end_with_threads


def draft_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler for the engine's scheduling order and draft settings."""
    settings = draft_settings(vllm_config)
    is_async = vllm_config.scheduler_config.async_scheduling
    bases: list[type[Scheduler]] = [AsyncScheduler if is_async else Scheduler]
    if settings.adaptive:
        bases.insert(0, AdaptiveDraftsMixin)
    if settings.record is not None:
        bases.insert(0, RecordingMixin)
    cls: type[Scheduler] = type("DraftScheduler", tuple(bases), {})
    end_with_threads()
    return cls(vllm_config=vllm_config, **kwargs)
