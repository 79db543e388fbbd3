"""What a server is asked to load is checked before its engine is asked."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.lora.request import LoRARequest

from tests.support.vllm_configs import replan, vllm_config
from vllm_diffusion.live.http import CheckedModels
from vllm_diffusion.weights.adapters import early_checks
from vllm_diffusion.weights.adapters.early_checks import _checked_before_queueing

pytestmark = pytest.mark.engine


class Rules:
    """Refuse everything but one folder."""

    def check(self, path: str) -> None:
        if path != "good":
            raise ValueError(f"LoRA adapter {path}: it is bad.")

    def check_loading(self, name: str, path: str) -> None:
        self.check(path)


def served(num_servers: int = 1, rules: Any = None, at_start: tuple[str, ...] = ()) -> Any:
    config = vllm_config()
    replan(config, adapters=rules)
    config.parallel_config._api_process_count = num_servers
    models = CheckedModels.__new__(CheckedModels)
    models.model_config = config.model_config
    models.engine_client = mock.Mock(vllm_config=config)
    models.static_lora_modules = [LoRAModulePath(name, "good") for name in at_start]
    return models


def load(models: Any, path: str, *, stock: Any = None) -> Any:
    request = LoadLoRAAdapterRequest(lora_name="poet", lora_path=path)
    with mock.patch.object(
        OpenAIServingModels, "_check_load_lora_adapter_request", mock.AsyncMock(return_value=stock)
    ):
        return asyncio.run(models._check_load_lora_adapter_request(request))


def test_loading() -> None:
    """Vllm's refusal comes first; a model without rules is vLLM's alone."""
    assert load(served(rules=Rules()), "good") is None
    assert load(served(rules=Rules()), "bad", stock="refused") == "refused"
    assert load(served(), "bad") is None
    refusal = load(served(rules=Rules()), "bad").error
    assert (refusal.code, refusal.param) == (400, "lora_path")
    assert refusal.message == "lora_path LoRA adapter bad: it is bad."


def test_command_line_of_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON may say anything."""
    monkeypatch.setattr(early_checks, "_named", [("poet", 3)])
    with pytest.raises(
        ValueError, match="--lora-modules: name='poet' and path=3 must both be strings; give"
    ):
        early_checks.check_command_line(Rules())


def test_several_api_servers() -> None:
    """One of them cannot load for all; each loads those of the command line."""
    message = load(served(2, Rules()), "good").error.message
    assert message.startswith("lora_path cannot be loaded by one of several API servers")
    assert load(served(2, Rules(), at_start=("poet",)), "good") is None
    assert "it is bad" in load(served(2, Rules(), at_start=("poet",)), "bad").error.message


def test_queueing() -> None:
    """A request of an adapter whose files are bad by now is refused, by its model's name."""
    from vllm.exceptions import VLLMValidationError

    seen: list[Any] = []
    check = _checked_before_queueing.make(lambda self, request: seen.append(request))
    check(served(rules=Rules()), None)
    check(served(rules=Rules()), LoRARequest("poet", 1, "good"))
    check(served(), LoRARequest("poet", 1, "bad"))
    with pytest.raises(VLLMValidationError, match="model 'poet': LoRA adapter bad") as raised:
        check(served(rules=Rules()), LoRARequest("poet", 1, "bad"))
    assert raised.value.parameter == "model"
    assert len(seen) == 4
