"""The class of the workers."""

from __future__ import annotations


def choose_worker(given: str, worker: str) -> str:
    """Choose the class of the workers, or check the operator's.

    Args:
        given: ``--worker-cls``.
        worker: Path of our class.

    Raises:
        ValueError: If the operator's class does not derive from ours.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    # A configuration is checked again in each process; our class need not be imported for that.
    if given in ("auto", worker):
        return worker
    bases = resolve_obj_by_qualname(given).__mro__
    if worker not in {f"{base.__module__}.{base.__qualname__}" for base in bases}:
        raise ValueError(
            f"--worker-cls {given} has no model runner for canvases; derive it "
            f"from {worker}, or leave it out and use --worker-extension-cls."
        )
    return given
