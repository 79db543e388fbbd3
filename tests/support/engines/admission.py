"""vLLM's checks of a request in the process that has the client, without a renderer."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from tests.support.engines.vllm_configs import replan, vllm_config
from vllm_diffusion.requests import validation


class Processor(InputProcessor):
    """vLLM's input processor of a model without a tokenizer, which records what it has to forget.

    Attributes:
        forgotten: Hashes of pictures that are no longer to be taken for the engine's.
    """

    def __init__(self, vllm_config: Any) -> None:
        validation.install()
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.diffusion_config = None
        self.lora_config = None
        self.scheduler_config = vllm_config.scheduler_config
        self.speculative_config = None
        self.structured_outputs_config = vllm_config.structured_outputs_config
        self.supports_mm_inputs = False
        self.skip_prompt_length_check = False
        self.generation_config_fields: dict[str, Any] = {}
        self.forgotten: list[str] = []
        self.renderer: Any = SimpleNamespace(
            tokenizer=None,
            get_eos_token_id=lambda: None,
            validate_token_ids=lambda *arguments, **options: None,
            queue_mm_cache_invalidations=self.forgotten.extend,
        )
        self.validate_logits_processors_params = lambda params: None

    def resolve_watermarking(self, params: Any) -> bool:
        return False


def validate(params: Any, vllm_config: Any) -> None:
    """Check sampling parameters as vLLM's input processor does for a model without a tokenizer.

    Raises:
        ValueError: If the request is refused.
    """
    prompt: Any = {"type": "token", "prompt_token_ids": [1]}
    Processor(vllm_config).process_inputs("request", prompt, params, ("generate",))


def checked(params: Any, spec: Any, checkpoint: Any = None) -> None:
    """Check a request for canvases of a description as the API process does.

    Args:
        params: The request's ``SamplingParams``.
        spec: Description of the canvases.
        checkpoint: Folder of the model; ``None`` for the shipped one.

    Raises:
        ValueError: If the request is refused.
    """
    config = vllm_config(checkpoint)
    replan(config, spec=spec)
    validate(params, config)


@contextmanager
def refused(field: str, words: str = "") -> Iterator[pytest.ExceptionInfo[VLLMValidationError]]:
    """Check that a request is refused by the name of a field, in words that match."""
    with pytest.raises(VLLMValidationError, match=words) as raised:
        yield raised
    assert raised.value.parameter == field
