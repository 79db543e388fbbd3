"""New weights for a running server, by vLLM's own ways: what is not finite is refused before it is
served.

``reload_weights`` reads a folder, whose files are checked before anything changes. Transfers
(``nccl``, ``ipc``) call ``load_weights`` once for each part; a bad tensor is left out, and the
update is refused when all of it has come: a trainer that broadcasts would otherwise wait for ever.
Layers that are not complete by then keep what they had.
"""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_diffusion.weights.adapters.checking_manager import Adaptable
from vllm_diffusion.weights.weight_files import (
    check_weight_files,
    largest_magnitude,
    largest_of,
    listed,
    stored_tensors,
    weight_files,
)


class WeightsRefusedError(ValueError):
    """New weights that are not served; every rank finds the same fault in them."""


class FiniteWeights:
    """Mixin that precedes a worker of vLLM's."""

    def reload_weights(
        self, weights_iterator: Any = None, weights_path: str | None = None, **options: Any
    ) -> None:
        """Load a folder as vLLM does, after a look at its files.

        Raises:
            ValueError: Naming the file or the tensors; nothing was loaded.
        """
        worker: Any = self
        with self._one_refusal():
            if weights_iterator is None and _is_ours(worker.get_model()):
                check_folder(weights_path or worker.model_config.model)
            super().reload_weights(weights_iterator, weights_path, **options)  # type: ignore[misc]

    def update_weights(self, update_info: Any) -> None:
        """Take a part of an update as vLLM does.

        Raises:
            ValueError: Naming the tensors that are not finite; the update is over.
        """
        worker: Any = self
        model = worker.get_model()
        with self._one_refusal():
            model.left_out = []
            try:
                super().update_weights(update_info)  # type: ignore[misc]
                if model.left_out:
                    worker._weight_update_active = False
                    raise WeightsRefusedError(
                        f"{_refusal(model.left_out)}; begin the update again with good ones before requests are "
                        "answered: layers that were complete by then have new weights, the others old ones."
                    )
            finally:
                model.left_out = None

    @contextmanager
    def _one_refusal(self) -> Iterator[None]:
        """Give layers that an error left without tensors theirs back; let the last rank alone
        report a refusal.

        vLLM reads the ranks' answers in order up to the first error, and would take those that are
        left for answers to its next call.
        """
        worker: Any = self
        try:
            yield
        except Exception as error:
            if _is_ours(worker.get_model()):
                _put_back(worker.get_model(), worker.model_config)
            is_last = worker.rank == worker.parallel_config.world_size - 1
            if is_last or not isinstance(error, WeightsRefusedError):
                raise


@contextmanager
def finite_only(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the tensors of an update that are finite, and refuse the others once all have come.

    Raises:
        ValueError: Naming the tensors, unless the worker collects them.
    """
    collected: list[str] | None = getattr(model, "left_out", None)
    left_out = [] if collected is None else collected

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if is_finite(tensor):
                yield name, tensor
            else:
                left_out.append(name)

    yield passing()
    if left_out and collected is None:
        raise WeightsRefusedError(
            f"{_refusal(left_out)}; load good ones before requests are answered."
        )


def is_finite(tensor: Tensor) -> bool:
    """Return true if every value is finite, and for tensors that only stand for values."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    return (
        not is_plain
        or not tensor.is_floating_point()
        or not tensor.numel()
        or bool(largest_of(tensor.detach()).isfinite())
    )


def check_folder(path: str) -> None:
    """Check each file and each value of a local checkpoint.

    Raises:
        ValueError: Naming the file or the tensors.
    """
    try:
        if os.path.isabs(path) and not os.path.isdir(path):
            raise ValueError(f"{path} is not a folder that the server can read.")
        check_weight_files(path)
    except ValueError as error:
        raise WeightsRefusedError(f"{error} Nothing was loaded.") from None
    stored = stored_tensors(weight_files(Path(path)))
    if bad := [one.name for one in stored if not math.isfinite(largest_magnitude(one))]:
        raise WeightsRefusedError(
            f"{path}: {_refusal(bad)}; train or write the checkpoint again. Nothing was loaded."
        )


def _refusal(names: list[str]) -> str:
    return f"{listed(names)} hold{'s' if len(names) == 1 else ''} numbers that are not finite"


def _is_ours(model: nn.Module) -> bool:
    return isinstance(model, Adaptable)


def _put_back(model: nn.Module, model_config: Any) -> None:
    """Give the layers that were not loaded whole their tensors back."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel, info.loaded_weights = 0, []
    with torch.no_grad():
        finalize_layerwise_reload(model, model_config)
