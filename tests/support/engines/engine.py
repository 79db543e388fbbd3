"""The real engine in the test's process, with what its sampler saw recorded."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowLogits
from tests.support.engines.generate import run_batches, small_engine
from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.startup.plan import spec_of

# Whether passes are scheduled asynchronously, with the order that runs without ``-m slow``.
SYNCHRONOUS_OFTEN = [
    pytest.param(False, id="synchronous"),
    pytest.param(True, id="asynchronous", marks=pytest.mark.slow),
]
ASYNCHRONOUS_OFTEN = [
    pytest.param(False, id="synchronous", marks=pytest.mark.slow),
    pytest.param(True, id="asynchronous"),
]


@dataclass
class StepRecord:
    """One request's canvas rows in one pass.

    Attributes:
        request_id: The engine's id.
        canvas: [num_rows], the tokens that the pass started from.
        logits: [num_rows, vocab_size], softcapped, before temperature.
        encoding: Whether the rows were a finished canvas.
    """

    request_id: str
    canvas: Tensor
    logits: Tensor
    encoding: bool


class TracedEngine:
    """``vllm.LLM`` and the model runner inside it."""

    def __init__(self, checkpoint: Path, **kwargs: Any) -> None:
        from vllm import LLM

        # vLLM collects garbage a dozen times in an engine's life. Each time it would walk the
        # million objects that imports have made, half a second each, since it thaws whatever is
        # frozen.
        gc.collect()
        gc.freeze()
        with mock.patch.object(gc, "freeze"):
            self.llm = LLM(**small_engine(checkpoint, **kwargs))
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        # None where the workers are other processes.
        driver = getattr(core.model_executor, "driver_worker", None)
        self.runner = driver and driver.worker.model_runner
        # Ids of requests that lost their memory, in order; a test empties it before it counts.
        self.preempted: list[str] = []
        preempt = self.scheduler._preempt_request

        def recording(request: Any, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        self.scheduler._preempt_request = recording

    @property
    def state(self) -> Any:
        return self.runner.model_state

    @property
    def slots(self) -> Any:
        return self.runner.model_state.slots

    @contextmanager
    def recording(self) -> Iterator[list[StepRecord]]:
        """Record every pass's canvas rows."""
        sampler = self.runner.sampler
        original = type(sampler).__call__
        steps: list[StepRecord] = []

        def recording_call(this: Any, rows: Tensor, input_batch: Any, *args: Any) -> Any:
            if rows.shape[0]:
                projected = RowLogits(
                    this.head.project(rows, slice(0, len(this.head.weight))), 0, this.head.softcap
                )
                logits = projected.scaled(torch.ones(len(rows)))
                bounds = this.pass_rows.requests.starts
                for i, req_id in enumerate(input_batch.req_ids):
                    low, high = int(bounds[i]), int(bounds[i + 1])
                    if low == high:
                        continue
                    slot = int(input_batch.idx_mapping_np[i])
                    steps.append(
                        StepRecord(
                            req_id,
                            self.slots.canvas[slot, : high - low].clone(),
                            logits[low:high].clone(),
                            int(self.slots.phase[slot]) == Phase.COMMITTING,
                        )
                    )
            return original(this, rows, input_batch, *args)

        with mock.patch.object(type(sampler), "__call__", recording_call):
            yield steps

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count the rows of each pass that is scheduled."""
        rows: list[int] = []
        schedule = self.scheduler.schedule

        def counted(*args: Any) -> Any:
            output = schedule(*args)
            if output.total_num_scheduled_tokens:
                rows.append(output.total_num_scheduled_tokens)
            return output

        with mock.patch.object(self.scheduler, "schedule", counted):
            yield rows

    @staticmethod
    def sampling_params(**params: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(**({"skip_special_tokens": False} | params))

    def generate(
        self, prompts: list[list[int]], *, seeds: list[int], max_tokens: int, **params: Any
    ) -> list[Any]:
        """Return the finished ``CompletionOutput`` of each prompt of token ids, in order."""
        sampling = [
            self.sampling_params(seed=seed, max_tokens=max_tokens, **params) for seed in seeds
        ]
        return [output.outputs[0] for output in self.outputs(prompts, sampling)]

    def outputs(self, prompts: Sequence[Sequence[int]], params: Any, **more: Any) -> list[Any]:
        """Return the finished ``RequestOutput`` of each prompt of token ids, in order."""
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(asked, params, use_tqdm=False, **more)

    def finish(self) -> dict[str, Any]:
        """Run until no request is left; return each ``RequestOutput`` by name, as they ended."""
        core, ended = self.llm.llm_engine, {}
        while core.has_unfinished_requests():
            ended |= {output.request_id: output for output in core.step() if output.finished}
        return ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_use(self) -> dict[str, int]:
        """Count whatever a request occupies while it runs, in the scheduler and in the runner."""
        scheduler, runner = self.scheduler, self.runner
        pool = scheduler.kv_cache_manager.block_pool
        found = {
            "requests": len(scheduler.requests),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            # One block is never handed out.
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "front end": self.llm.llm_engine.get_num_unfinished_requests(),
        }
        has_canvases = spec_of(self.llm.llm_engine.vllm_config.model_config) is not None
        if has_canvases:
            found["constraints"] = len(scheduler.constraints._canvases)
            found["idle passes"] = len(scheduler.stuck._idle_passes)
            found["held log-probabilities"] = len(scheduler.prompt_logprobs._held)
        if runner:
            found["runner rows"] = len(runner.req_states.req_id_to_index)
        if runner and has_canvases:
            adjustments = runner.sampler.adjustments
            found["slots"] = len(self.state._slot_of_request)
            found["allowed ids"] = len(self.slots.features.allowed_ids)
            found["viewed slots"] = len(self.slots.features.viewed)
            found["adjusted slots"] = len(adjustments._listed) + len(adjustments._penalised)
        return found

    def check_integrity(self) -> None:
        """Fail if requests, which are all over, have left something."""
        # The runner hears of a request's end with the next pass.
        self.llm.llm_engine.step()
        left = {name: number for name, number in self.in_use().items() if number}
        assert not left, left

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if not self.llm.llm_engine.has_unfinished_requests():
            self.check_integrity()
        with mock.patch.object(gc, "unfreeze"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm, self.runner, self.scheduler
            cleanup_dist_env_and_memory()
        gc.collect()


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    """Return the tokens of the only answer in each ``RequestOutput``."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def run_here(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Run the ``batches`` of :func:`tests.support.engines.generate.run_engine` in this process."""
    options = dict(job["engine"])
    with TracedEngine(options.pop("model"), **options) as engine:
        return run_batches(engine.llm, job)
