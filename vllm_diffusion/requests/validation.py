"""Checks of a diffusion model's requests, in the API process.

They replace vLLM's: what our sampler honours is accepted, and what it cannot honour is a 400 that
names the field. Before them an endpoint has read the body (``http.py``); after them come the engine
and, for a transfer that does not fit, the scheduler.
"""

import copy
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import msgspec

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.arguments import PREFIX, parse_arguments, with_end_texts
from vllm_diffusion.requests.bodies import body_number
from vllm_diffusion.requests.bounds import Problem
from vllm_diffusion.requests.checked_request import CheckedRequest
from vllm_diffusion.requests.constraint import read_constraint
from vllm_diffusion.requests.exclusions import excluded
from vllm_diffusion.requests.greedy_filters import noted_filters
from vllm_diffusion.requests.pictures import giving_pictures_back
from vllm_diffusion.requests.refusals import failing_aloud, refuse
from vllm_diffusion.requests.texts import brought_tokens, check_vocabulary
from vllm_diffusion.weights.adapters.early_checks import check_request


def install() -> None:
    """Put our checks in place of vLLM's, for diffusion models only. Safe to call twice."""
    _checking_canvases.install()


@replaces_call(
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    reason="Stock refuses temperature, seed, min_p and every constraint, which our sampler honours; believes pictures "
    "of a refused request to be with the engine; and lets an adapter end it that can no longer be loaded.",
    until="A model's configuration may name the sampling parameters that its sampler honours, and a worker that cannot "
    "load an adapter refuses the request and not the batch.",
)
def _checking_canvases(
    stock: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make an engine's request, with our checks in place of those that only diffusion models
    have.
    """
    from vllm.sampling_params import SamplingParams

    model_config = self.model_config
    plan = getattr(model_config, "diffusion", None)
    if plan is None or not isinstance(params, SamplingParams):
        return stock(self, request_id, prompt, params, *args, **kwargs)
    unaware = copy.copy(self)
    unaware.model_config = _NotDiffusion(model_config)
    # Constraints are checked here.
    unaware.structured_outputs_config = None
    unaware.generation_config_fields = with_end_texts(
        self.generation_config_fields, plan.spec, self.tokenizer
    )
    with giving_pictures_back(self.renderer, prompt):
        # Both of vLLM's engines give it by name.
        admit(params, self, prompt, kwargs.get("lora_request"))
        return stock(unaware, request_id, prompt, params, *args, **kwargs)


class _NotDiffusion:
    """A model's configuration that does not say that it is a diffusion model."""

    is_diffusion = False

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_config, name)


def admit(params: Any, processor: Any, prompt: Any, lora_request: Any = None) -> None:
    """Admit a request to the engine: read what it asks for, complete it, find what excludes what,
    and freeze it.

    Args:
        params: The request's ``SamplingParams``. They get the struct of arguments that all code
            after this reads, and their constraint is written as the engine follows it.
        processor: vLLM's ``InputProcessor`` of a diffusion model.
        prompt: The request's prompt, rendered.
        lora_request: Its adapter; ``None`` for none.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    model_config = processor.model_config
    token_ids = (prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None) or ()
    with failing_aloud():
        check_request(lora_request, model_config)
        check_vocabulary(token_ids, model_config.get_vocab_size())
        if model_config.diffusion.spec is None:
            _refuse_first(_without_effect(params))
        else:
            request = _completed(_read(params, processor, len(token_ids)))
            _refuse_first(excluded(request))
            request.freeze()
        read_constraint(params.structured_outputs, processor.structured_outputs_config)


def _read(params: Any, processor: Any, num_prompt: int) -> CheckedRequest:
    """Run vLLM's checks of what a request asks for, and read its arguments about canvases."""
    model_config = processor.model_config
    # First, so that ours read numbers and token ids of the vocabulary.
    params.verify(
        _NotDiffusion(model_config), processor.speculative_config, None, processor.tokenizer
    )
    _refuse_first(chain(_ignored(params), bounds.problems(params)))
    arguments = parse_arguments(
        params.extra_args,
        spec=model_config.diffusion.spec,
        vocab_size=model_config.get_vocab_size(),
        logprob_token_ids=params.logprob_token_ids,
    )
    return CheckedRequest(params, arguments, num_prompt, processor)


def _completed(request: CheckedRequest) -> CheckedRequest:
    """Return a request with what other fields and the prompt say of its canvases."""
    found = brought_tokens(request)
    found["body"] = body_number.get()
    if request.way.rule.judges_filtered:
        found["judging_top_k"], found["judging_top_p"] = noted_filters(request.params)
    return replace(request, arguments=msgspec.structs.replace(request.arguments, **found))


def _without_effect(params: Any) -> Iterator[Problem]:
    """Find arguments about canvases where the server answers token after token."""
    for name in params.extra_args or {}:
        if name.startswith(PREFIX):
            reason = "has no effect here: the server answers token after token; leave it out."
            yield name, reason, None


def _refuse_first(problems: Iterator[Problem]) -> None:
    for field, reason, value in problems:
        refuse(field, reason, value)


def _ignored(params: Any) -> Iterator[Problem]:
    """Find what a canvas's sampler would ignore."""
    for field in ("watermarking", "trace_decode_token_ids"):
        if (value := getattr(params, field)) not in (None, False):
            reason = (
                "is not supported for diffusion models, which draw a canvas at once and not "
                "token after token; leave it out."
            )
            yield field, reason, value
    for name in ("ec_transfer_params", "kv_transfer_params"):
        # vLLM's protocol checks its own fields of these names, and not those within vllm_xargs.
        value = (params.extra_args or {}).get(name)
        if value is not None and not isinstance(value, Mapping):
            yield name, f"must be a mapping; got {reprlib.repr(value)}.", None
