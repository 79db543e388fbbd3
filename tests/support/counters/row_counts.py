"""Rows that an engine runs for each token, and those among them that nothing reads.

Counted are the scheduler's passes and the runner's batches of an engine in this process, on any
platform. A product is one multiplication of a row with all embeddings of the vocabulary: a row that
is sampled takes one for its logits and, with self-conditioning, one for its soft embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class RowCounts:
    """Totals of some passes.

    Attributes:
        passes: Forward passes.
        rows: Rows of requests in them.
        padding: Rows beyond them, up to the size of a captured graph.
        sampled: Rows that are projected onto the vocabulary and drawn.
        embedded: Rows of which a soft embedding is stored; 0 where graphs do it.
        denoised: Rows of canvases that take a step.
        last: Rows of canvases among them for which it was the last step: nothing reads their soft
            embeddings.
        committed: Rows sampled of canvases that are decided: nothing reads what they draw.
        ended: Rows of requests that had ended when their pass returned: nothing reads them.
    """

    passes: int = 0
    rows: int = 0
    padding: int = 0
    sampled: int = 0
    embedded: int = 0
    denoised: int = 0
    last: int = 0
    committed: int = 0
    ended: int = 0

    @property
    def read(self) -> tuple[int, int, int, int]:
        """Rows of requests that go on, and those among them of each kind.

        In the asynchronous order it depends on the machine's time whether a request that has ended
        is in one more pass.
        """
        return self.rows - self.ended, self.denoised, self.last, self.committed


class RowCounter:
    """Counts the rows of an engine; ``counts`` may be replaced by new ones at any time.

    Attributes:
        counts: Totals since they were last replaced.
    """

    def __init__(self, llm: Any, sizes: Sequence[int] = ()) -> None:
        """Count from now on.

        Args:
            llm: The engine, in this process.
            sizes: Rows of the graphs that a GPU would have, ascending, on a platform without
                graphs.
        """
        core = llm.llm_engine.engine_core.engine_core
        self.counts = RowCounts()
        self._sizes = sizes
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        # Rows of the last step of each request that is denoising, which a later pass finds to have
        # been the last.
        self._stepped: dict[str, int] = {}
        for owner, name, before in (
            (self._scheduler, "update_from_output", self._count_scheduled),
            (self._runner.model_state, "prepare_attn", self._count_batch),
        ):
            _call_before(owner, name, before)
        if hasattr(self._scheduler, "_counters"):
            _call_before(self._scheduler._counters, "observe", self._count_part)
            eager = self._runner.sampler.graphs.eager
            _call_before(eager, "_store_soft_embeds", self._count_embedded)

    def _count_scheduled(self, scheduler_output: Any, model_runner_output: Any) -> None:
        counts, requests = self.counts, self._scheduler.requests
        counts.passes += scheduler_output.total_num_scheduled_tokens > 0
        for request_id, num_rows in scheduler_output.num_scheduled_tokens.items():
            counts.rows += num_rows
            if request_id not in requests or requests[request_id].is_finished():
                counts.ended += num_rows
                canvas = scheduler_output.scheduled_spec_decode_tokens.get(request_id, ())
                counts.sampled += len(canvas)

    def _count_part(self, request: Any, rows: Any, max_steps: int) -> None:
        counts, request_id = self.counts, request.request_id
        counts.sampled += rows.projected
        counts.denoised += rows.denoised
        counts.committed += 0 if rows.denoised else rows.projected
        if rows.num_emitted:
            counts.last += rows.denoised or self._stepped.get(request_id, 0)
        self._stepped[request_id] = rows.denoised

    def _count_embedded(self, soft_embeds: Any, slot: Any, position: Any) -> None:
        self.counts.embedded += len(soft_embeds)

    def _count_batch(self, input_batch: Any, *args: Any, **kwargs: Any) -> None:
        padded = input_batch.num_tokens_after_padding
        padded = next((size for size in self._sizes if size >= padded), padded)
        self.counts.padding += padded - input_batch.num_tokens


def serve(llm: Any, requests: Sequence[tuple[list[int], Any]], at_once: int) -> list[Any]:
    """Serve requests, so many at a time: the next one comes when one has been answered.

    Args:
        llm: The engine.
        requests: Prompt and sampling parameters of each.
        at_once: Requests that the engine has.

    Returns:
        The finished ``CompletionOutput`` of each, in order.
    """
    engine, waiting = llm.llm_engine, dict(enumerate(requests))
    answers: dict[int, Any] = {}
    while len(answers) < len(requests):
        while waiting and engine.get_num_unfinished_requests() < at_once:
            index = next(iter(waiting))
            prompt, params = waiting.pop(index)
            engine.add_request(f"{at_once} {index}", {"prompt_token_ids": prompt}, params)
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id.split()[1])] = output.outputs[0]
    # The pass that was on its way, in the asynchronous order.
    engine.step()
    return [answers[index] for index in sorted(answers)]


def _call_before(owner: Any, name: str, before: Any) -> None:
    """Call ``before`` with the arguments of ``owner.name`` each time, and then that."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, call)
