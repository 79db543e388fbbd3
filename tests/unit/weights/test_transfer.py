"""What several workers answer, where one of them refuses."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.engine


class Worker:
    """Its queue of answers: one for every call."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = deque(answers)

    def dequeue(self, timeout: float | None = None) -> Any:
        return self.answers.popleft()


def executor(*workers: list[Any], is_failed: bool = False, is_ours: str = "model") -> Any:
    """As much of vLLM's executor as a call to its workers needs."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

    from vllm_diffusion.weights import transfer

    transfer.collect_all_answers()
    status = WorkerProc.ResponseStatus
    queues = [
        Worker([(status.FAILURE if a == "refused" else status.SUCCESS, a) for a in answers])
        for answers in workers
    ]
    parallel = SimpleNamespace(enable_fault_tolerance=False)
    made = SimpleNamespace(
        rpc_broadcast_mq=SimpleNamespace(enqueue=lambda call: None),
        is_failed=is_failed,
        response_mqs=queues,
        futures_queue=deque(),
        vllm_config=SimpleNamespace(
            parallel_config=parallel,
            diffusion_config=SimpleNamespace() if is_ours == "model" else None,
            weight_transfer_config=SimpleNamespace(backend="safetensors" if is_ours else "nccl"),
        ),
    )
    return SimpleNamespace(
        call=lambda **options: MultiprocExecutor.collective_rpc(made, "update", **options),
        queues=queues,
    )


def test_bad_weights_of_workers() -> None:
    """The engine's process learns of them from a finish that fails, and of good ones from one that does not."""
    from vllm_diffusion.weights.transfer import _MARK, observe_call, why_refused

    config = SimpleNamespace(instance_id="an engine")
    finish = "finish_weight_update"
    observe_call(config, finish, RuntimeError("a tensor was not sent"))
    assert why_refused(config) is None
    observe_call(config, finish, RuntimeError(f"Worker failed: ...; {_MARK}"))
    assert "not finite" in (why_refused(config) or "")
    assert why_refused(SimpleNamespace(instance_id="another")) is None
    # An update is closed, and nothing was sent in it; one is sent whose finish fails.
    observe_call(config, finish, None)
    observe_call(config, "update_weights", None)
    observe_call(config, finish, RuntimeError(f"Worker failed: ...; {_MARK}"))
    observe_call(config, finish, None)
    assert why_refused(config) is not None
    observe_call(config, "update_weights", None)
    observe_call(config, finish, None)
    assert why_refused(config) is None


@pytest.mark.parametrize("is_ours", ["model", "transfer"])
@pytest.mark.parametrize("first", [["refused", 1], ["ok", 1]])
def test_next_call_after_a_refusal(first: list[Any], is_ours: str) -> None:
    """It is answered by its own answers, whichever worker refused the one before it."""
    ours = executor(first, ["refused", 2], ["ok", 3], is_ours=is_ours)
    with pytest.raises(RuntimeError, match="refused"):
        ours.call()
    assert ours.call() == [1, 2, 3]


def test_stock_leaves_answers() -> None:
    """Why this is needed; and other models' engines stay vLLM's."""
    stock = executor(["refused", 1], ["refused", 2], is_ours="")
    with pytest.raises(RuntimeError, match="refused"):
        stock.call()
    with pytest.raises(RuntimeError, match="refused"):
        stock.call()


def test_workers_that_were_not_asked() -> None:
    """Nobody waits for an answer that will not come."""
    with pytest.raises(RuntimeError, match="failed"):
        executor([], [], is_failed=True).call()


def test_one_reply() -> None:
    """Others have not answered a call to one of them."""
    ours = executor(["ok"], ["refused", 2])
    with pytest.raises(RuntimeError, match="refused"):
        ours.call(unique_reply_rank=1)
    assert len(ours.queues[0].answers) == 1
