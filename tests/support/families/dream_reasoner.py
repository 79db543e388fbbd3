"""DreamReasoner: SDAR's loop with other defaults.

Source: a third party's port of the checkpoint's ``generation_utils.py``, which states that it is
exact (Yanzhen-CN/Benchmark-dllm at b8e8cfb, ``src/dllm_bench/models/dreamreasoner.py``). The
publisher's own was not found.
"""

from collections.abc import Sequence
from typing import Any

from tests.support.families import sdar
from tests.support.families.run import Model, Run


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    block_length: int = 32,
    denoising_steps: int | None = None,
    temperature: float = 0.0,
    remasking_strategy: str = "low_confidence_dynamic",
    confidence_threshold: float = 0.9,
    **others: Any,
) -> Run:
    """As :func:`sdar.generate`; a block takes one step with ``low_confidence_static``, else one a
    position.

    The last step takes every mask that is left. Here that needs no code: each step reveals its
    number of the even schedule where there are as many masks, so that the last finds no more than
    its own number, and SDAR's loop raises where masks are left.

    Differs from the port, besides in what :func:`sdar.generate` lists:

    - At temperature 0 the probability is that before ``top_k`` and ``top_p``.
    - ``sequential`` counts masks; there it counts positions from the first mask on, which are the
      same unless one after it is decided.
    - End tokens end the generation as in SDAR's loop; the port has none.
    - ``entropy_bounded`` is left out.
    """
    if denoising_steps is None:
        denoising_steps = 1 if remasking_strategy == "low_confidence_static" else block_length
    return sdar.generate(
        model,
        prompt_ids,
        block_length=block_length,
        denoising_steps=denoising_steps,
        temperature=temperature,
        remasking_strategy=remasking_strategy,
        confidence_threshold=confidence_threshold,
        **others,
    )
