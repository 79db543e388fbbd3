"""Class of the workers, whose model runner runs canvases."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def choose_worker(parallel_config: ParallelConfig, worker: str) -> None:
    """Choose the class of the workers, or check the operator's.

    Args:
        parallel_config: Configuration, changed in place.
        worker: Path of our class.

    Raises:
        ValueError: If the operator's class does not derive from ours.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    if parallel_config.worker_cls == "auto":
        parallel_config.worker_cls = worker
    # A configuration is checked again in each process; our class need not be imported for that.
    if parallel_config.worker_cls == worker:
        return
    bases = resolve_obj_by_qualname(parallel_config.worker_cls).__mro__
    if worker not in {f"{base.__module__}.{base.__qualname__}" for base in bases}:
        raise ValueError(
            f"--worker-cls {parallel_config.worker_cls} has no model runner for canvases; derive it "
            f"from {worker}, or leave it out and use --worker-extension-cls."
        )
