"""MinerU-Diffusion on vLLM's Qwen3, with the tower of its Qwen2-VL for pictures."""

import copy

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen2_vl import (
    Qwen2VisionTransformer,
    Qwen2VLForConditionalGeneration,
    Qwen2VLMultiModalProcessor,
)
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import (
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_diffusion.families.mineru.pictures import DummyPictures, PictureInfo
from vllm_diffusion.runner.embedded_state import EmbeddedModelState
from vllm_diffusion.runner.masked_model import MaskedModel
from vllm_diffusion.sampling.output_head import OutputHead, head_of
from vllm_diffusion.weights.adapters import checking_manager


class MinerUModelState(EmbeddedModelState):
    """State whose canvases are tokens, after prompts with pictures."""

    def output_head(self) -> OutputHead:
        return head_of(self.model.language_model, never_drawn=self.spec.never_drawn)


@MULTIMODAL_REGISTRY.register_processor(
    Qwen2VLMultiModalProcessor, info=PictureInfo, dummy_inputs=DummyPictures
)
class MinerUDiffusionForConditionalGeneration(MaskedModel, Qwen2VLForConditionalGeneration):
    """V1 2.5B."""

    published_names = WeightsMapper(
        orig_to_new_prefix={
            "vision_model.": "visual.",
            # The publisher's projector is what Qwen2-VL has at the end of its tower.
            "vision_abstractor.projection.": "visual.merger.",
        }
    )
    # Names are the checkpoint's own beyond those two.
    hf_to_vllm_mapper = published_names
    # On the device vLLM normalises by the values in the checkpoint's file, and not at all where it
    # has none.
    supports_mm_device_do_normalize = False
    packed_modules_mapping = Qwen3ForCausalLM.packed_modules_mapping

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        checking_manager.install()
        # The base's constructor builds a Qwen2 and a tower of another width.
        nn.Module.__init__(self)
        model_config = vllm_config.model_config
        self.config = config = model_config.hf_config
        self.model_config = model_config
        self.multimodal_config = model_config.get_multimodal_config()
        self.use_data_parallel = self.multimodal_config.mm_encoder_tp_mode == "data"
        tower = copy.copy(config.vision_config)
        tower.hidden_size = config.text_config.hidden_size
        with self._mark_tower_model(vllm_config, "image"):
            self.visual = Qwen2VisionTransformer(
                tower,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "visual"),
            )
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config,
                prefix=maybe_prefix(prefix, "language_model"),
                hf_config=config.text_config,
                architectures=["Qwen3ForCausalLM"],
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    @staticmethod
    def get_model_state_cls() -> type[MinerUModelState]:
        """The state whose prompts have pictures."""
        return MinerUModelState
