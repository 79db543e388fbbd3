"""Filters of requests at temperature 0: vLLM erases them, and a rule may judge tokens by what they
keep.

The likeliest token is the same with a filter and without, but its probability is not, nor is the
entropy of what is kept. A rule that ``judges_filtered`` reveals tokens in the order of these. vLLM
sets ``top_k`` to 0 and ``top_p`` to 1 where parameters are made, so their values are noted before,
in ``extra_args``, which copies of the parameters have too.
"""

from typing import Any

from vllm_diffusion.decoding.rule import FLOAT32_MIN, INT32_MAX, Setting

# Key in ``extra_args``.
NOTED = "vllm_diffusion_filters_at_temperature_0"
_TOP_K, _TOP_P = Setting(int, -1, INT32_MAX), Setting(float, FLOAT32_MIN, 1.0)


def note_filters(params: Any) -> None:
    """Note the filters of ``SamplingParams`` at temperature 0, before vLLM erases them.

    Args:
        params: The parameters, which vLLM has checked; ``extra_args`` is replaced if they have a
            filter.
    """
    if params.temperature == 0 and (params.top_k > 0 or params.top_p < 1):
        noted = [params.top_k, params.top_p]
        params.extra_args = {**(params.extra_args or {}), NOTED: noted}


def noted_filters(params: Any) -> tuple[int, float]:
    """Return ``top_k`` and ``top_p`` as the request has them at temperature 0; 0 and 1 for none.

    What a client sends under the name of the note is not a filter unless it is of the note's form.

    Args:
        params: ``SamplingParams`` of a request.
    """
    noted = (params.extra_args or {}).get(NOTED)
    if params.temperature != 0 or not isinstance(noted, list) or len(noted) != 2:
        return 0, 1.0
    top_k, top_p = noted
    if not (_TOP_K.allows(top_k) and _TOP_P.allows(top_p)):
        return 0, 1.0
    return max(top_k, 0), float(top_p)
