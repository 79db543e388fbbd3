"""LoRA adapters in a worker: vLLM's manager with a check of an adapter before its weights are
read.
"""

from copy import copy
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.fused_moe import MoERunner

from vllm_diffusion.hooks.replacement import replaces_call
from vllm_diffusion.weights.adapters.early_checks import support_of
from vllm_diffusion.weights.adapters.support import AdapterSupport
from vllm_diffusion.weights.weight_files import is_of_adapter


class Adaptable:
    """Mixin of models that can have adapters.

    Attributes:
        embedding_modules: Empty: the vocabulary is streamed through the checkpoint's own matrices.
        adapter_manager: Class that puts adapters on the model's layers.
        adapter_weights: Class that reads an adapter.
    """

    embedding_modules: ClassVar[dict[str, str]] = {}
    adapter_manager: ClassVar[type[LRUCacheLoRAModelManager]] = LRUCacheLoRAModelManager
    adapter_weights: ClassVar[type[LoRAModel]] = LoRAModel
    # vLLM's loader leaves out files of such tensors alone: an adapter next to the weights is none
    # of them.
    is_unused_checkpoint_weight = staticmethod(is_of_adapter)


def install() -> None:
    """Let vLLM's model runner make our manager for diffusion models. This is safe to call twice.

    The runner makes a manager after the model.
    """
    _checking_where_there_are_rules.install()


@replaces_call(
    "vllm.v1.worker.lora_model_runner_mixin:LRUCacheWorkerLoRAManager",
    reason="The runner makes this manager by name; ours checks an adapter, for diffusion models.",
    until="A model may name its adapter manager's class.",
)
def _checking_where_there_are_rules(
    stock: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any
) -> Any:
    has_support = support_of(vllm_config.model_config) is not None
    return (CheckingAdapterManager if has_support else stock)(vllm_config, *args, **kwargs)


class CheckingAdapterManager(LRUCacheWorkerLoRAManager):
    """Manager of one worker's adapters that checks them before it loads them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, *args: Any) -> None:
        super().__init__(vllm_config, device, *args)
        self._support: AdapterSupport = vllm_config.model_config.diffusion.adapters

    def create_lora_manager(self, model: nn.Module, vllm_config: VllmConfig) -> Any:
        self._manager_cls = model.adapter_manager
        self._lora_model_cls = model.adapter_weights
        adapted = super().create_lora_manager(model, vllm_config)
        # Experts that call a router themselves (SDAR-MoE's) get the one with adapters: vLLM looks
        # for the second name of a layer among what it has put in place of the experts meanwhile.
        layer_of = {id(layer.base_layer): layer for layer in self._adapter_manager.modules.values()}
        for module in adapted.modules():
            if isinstance(module, MoERunner) and id(module.gate) in layer_of:
                module.gate = layer_of[id(module.gate)]
        return adapted

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        """Check an adapter, then load it as vLLM does.

        Raises:
            ValueError: If the adapter does not fit; nothing of it is loaded then.
        """
        checked = copy(lora_request)
        checked.lora_path = str(self._support.check(lora_request.lora_path))
        return super()._load_adapter(checked)
