"""Weights that come to a running server, by our transfer or vLLM's: whether what is served is finite, and who says so.

Our transfer refuses weights that are not finite before it writes. vLLM's own transfers write in
place, so their weights are checked when an update finishes; the engine refuses requests until it
has good ones.

Also here: the executor reads the answers of all workers where one has refused a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.weight_files import largest_of

# Backend in --weight-transfer-config; plugin.py registers it.
WEIGHT_TRANSFER = "safetensors"
# What may become of the draft that an update of the draft has replaced.
RESTORE, DROP = FATES = ("restore", "drop")


_MARK = "requests are refused until good weights have come"


@dataclass
class _Bad:
    """Bad weights of an engine.

    Attributes:
        reason: Message for clients.
        is_sent: True if an update has sent tensors since they were found.
    """

    reason: str
    is_sent: bool = False


# By the instance of vLLM's configuration, which an engine and its workers share.
_bad: dict[str, _Bad] = {}


def why_refused(vllm_config: Any) -> str | None:
    """Return why an engine of this process refuses requests; ``None`` if it does not."""
    found = _bad.get(vllm_config.instance_id) if _bad else None
    return None if found is None else found.reason


def observe_call(vllm_config: Any, method: Any, error: BaseException | None) -> None:
    """Record the result of a call to all workers, which are processes of their own.

    Args:
        vllm_config: Configuration of the engine.
        method: Method that was called.
        error: Error of the call; ``None`` if every worker answered.
    """
    if method not in ("update_weights", "finish_weight_update"):
        return
    engine = vllm_config.instance_id
    if error is not None:
        if _MARK in str(error):
            _bad[engine] = _Bad(f"the served weights are not finite; {_MARK}")
    elif engine in _bad:
        if method == "update_weights":
            _bad[engine].is_sent = True
        elif _bad[engine].is_sent:
            del _bad[engine]


def check_transfers() -> None:
    """Let vLLM's transfers check the weights that they wrote into a diffusion model.

    This is safe to call twice.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    registry = WeightTransferEngineFactory._registry
    for name, load in list(registry.items()):
        if name != WEIGHT_TRANSFER and not hasattr(load, "checks_weights"):
            registry[name] = _checking(load)


def _checking(load: Callable[[], Any]) -> Callable[[], Any]:
    def load_checking() -> Any:
        stock = load()
        return type(stock.__name__, (_CheckedTransfer, stock), {})

    load_checking.checks_weights = True  # type: ignore[attr-defined]
    return load_checking


class _CheckedTransfer:
    """Mixin that precedes a transfer of vLLM's that writes in place."""

    vllm_config: Any
    model: nn.Module
    _default_model: nn.Module
    # True if the update has finished with bad weights. vLLM's worker then takes it as still open.
    _is_over = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Update weights as the transfer does; after bad weights this begins a new update."""
        if self._is_over:
            self._is_over = False
            super().start_weight_update()  # type: ignore[misc]
        super().update_weights(update_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        """Finish the update as the transfer does, then check the weights.

        Raises:
            ValueError: Naming the parameter; called again, this only closes the update.
        """
        if self._is_over:
            self._is_over = False
            return
        super().finish_weight_update()  # type: ignore[misc]
        is_ours = getattr(self.vllm_config.model_config, "tensor_rules", None) is not None
        if not is_ours or self.model is not self._default_model:
            return
        engine = self.vllm_config.instance_id
        # The first parameter that holds NaN or infinity.
        name = next((n for n, p in self.model.named_parameters() if not _is_finite(p.data)), None)
        if name is None:
            _bad.pop(engine, None)
            return
        _bad[engine] = _Bad(f"the served weights are not finite ({name}); {_MARK}")
        self._is_over = True
        raise ValueError(
            f"{name} holds numbers that are not finite, and they are written already; {_MARK}: send them, and "
            "finish."
        )


def _is_finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point() or not values.numel():
        return True
    return bool(largest_of(values).isfinite())


def collect_all_answers() -> None:
    """Take every worker's answer from its queue after a refusal. This is safe to call twice.

    vLLM stops at the first refusal. The other answers stay in their queues, and would be taken for
    answers to the next call: one weight update that does not fit would end a server of several
    ranks.
    """
    _collecting_all.install()


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
    # Our model, or a draft that our weight transfer updates.
    backend = getattr(self.vllm_config.weight_transfer_config, "backend", None)
    is_ours = self.vllm_config.diffusion_config is not None or backend == WEIGHT_TRANSFER
    if not is_ours or not is_waited_for:
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
