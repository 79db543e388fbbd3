"""Every worker's answer to a call that one of them refuses, such as an update of the weights."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.served_weights import observe_call
from vllm_diffusion.weights.transfer import WEIGHT_TRANSFER


def collect_all_answers() -> None:
    """Take every worker's answer from its queue after a refusal. This is safe to call twice.

    vLLM stops at the first refusal. The other answers stay in their queues, and would be taken for
    answers to the next call: one weight update that does not fit would end a server of several
    ranks.
    """
    _collecting_all.install()


def _loads_ours(vllm_config: Any) -> bool:
    """Return true if the model is ours, or its draft is updated by our weight transfer."""
    backend = getattr(vllm_config.weight_transfer_config, "backend", None)
    return vllm_config.diffusion_config is not None or backend == WEIGHT_TRANSFER


class _NotingQueue:
    """Queue of a worker's answers that notes when one was taken."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.is_taken = False

    def dequeue(self, timeout: float | None = None) -> Any:
        answer = self._queue.dequeue(timeout=timeout)
        self.is_taken = True
        return answer


@replaces_call(
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc",
    reason="Stock leaves the answers of other workers in their queues once one has refused.",
    until="The executor drains every worker's queue before it raises.",
)
def _collecting_all(stock: Any, self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    # A call without waiting is a pass of the model: its refusal ends the engine.
    is_waited_for = not kwargs.get("non_block")
    if not _loads_ours(self.vllm_config) or not is_waited_for:
        return stock(self, method, *args, **kwargs)
    queues = self.response_mqs
    noting = [_NotingQueue(queue) for queue in queues]
    self.response_mqs = noting
    try:
        answers = stock(self, method, *args, **kwargs)
        observe_call(self.vllm_config, method, None)
        return answers
    except RuntimeError as error:
        observe_call(self.vllm_config, method, error)
        # Without any answer the executor itself refused, and the workers were not asked.
        if kwargs.get("unique_reply_rank") is None and noting[0].is_taken:
            for each in noting:
                if not each.is_taken:
                    each.dequeue()
        raise
    finally:
        self.response_mqs = queues
