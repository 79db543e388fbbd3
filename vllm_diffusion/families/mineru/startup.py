"""MinerU-Diffusion: pages of documents to text, in blocks of 32 masks, revealed by confidence.

Pictures are tokens of the prompt, at positions like others. Blocks are counted from the end of the
prompt and attend in both directions; so do the prompt's own, of which the first is the short one.

Source: opendatalab/MinerU-Diffusion at 8d456f1, ``mineru_diffusion/modeling_mineru_diffusion.py``
with the settings of ``engines/hf/runner.py``: 32 steps, temperature 1, threshold 0.95. It differs:

- Temperature 0 takes the likeliest token at its plain probability; there it divides by zero.
- A step reveals masks only; there, where it is to reveal more than are left, it overwrites decided
  tokens.
- The mask token is never drawn, and among equally confident positions the leftmost comes first.
- Any ``max_tokens`` is served, and the last block is as short as what is left of the answer; there
  one that is not a multiple of 32 is refused, and ``engines/nano_dvlm`` writes whole blocks, beyond
  it.
- A transparent picture is laid on white; there its transparency is dropped, and the colour below
  shows.
- An answer ends with its first end token. There the loop ends after the block with the first
  ``<|endoftext|>`` or else ``<|im_end|>``, and the runner cuts what is printed at the first of
  both. Each text is one token, which ends an answer here too, whatever ``generation_config.json``
  names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2VLConfig, Qwen3Config
from transformers.configuration_utils import SubConfigSpec
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

from vllm_diffusion.decoding.layouts import BlockAfterPrompt
from vllm_diffusion.decoding.reveal import Reveal
from vllm_diffusion.startup.engine_config import PublishedRule
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.weights.checkpoint_tensors import BodyTensors, CheckpointTensors, Shape

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_TOWER = "qwen2_vl"


class MinerUDiffusionConfig(Qwen2VLConfig):
    """Qwen2-VL's with a Qwen3 for text.

    Attributes:
        vision_projector_type: What makes tokens of the tower's patches; only ``patch_merger2x`` is
            published.
        mask_token_id: Token of positions that are not revealed.
        tower: ``model_type`` of the tower in ``config.json``.
    """

    model_type = "mineru_diffusion"
    sub_configs_defaults = {
        "vision_config": SubConfigSpec(config_class=Qwen2VLVisionConfig),
        "text_config": SubConfigSpec(config_class=Qwen3Config),
    }

    text_config: Any = None
    vision_config: Any = None
    vision_projector_type: str = "patch_merger2x"
    mask_token_id: int = 151669
    tower: str = _TOWER

    def __post_init__(self, **kwargs: Any) -> None:
        self.text_config = self.text_config or kwargs.pop("language_model_config", None)
        self.vision_config = self.vision_config or kwargs.pop("vision_model_config", None)
        # As published it is called "sdar", whose layers are Qwen3's.
        if isinstance(self.text_config, dict):
            self.text_config = {**self.text_config, "model_type": Qwen3Config.model_type}
        if isinstance(self.vision_config, dict):
            self.tower = self.vision_config.get("model_type", "")
            self.vision_config = {**self.vision_config, "model_type": _TOWER}
        super().__post_init__(**kwargs)


class MinerUTensors(CheckpointTensors):
    """Tensors of the publisher's modules: a tower without its end, a projector and a Qwen3."""

    def shapes(self, config: Any) -> dict[str, Shape]:
        from transformers.models.qwen2_vl.modeling_qwen2_vl import (
            Qwen2VisionTransformerPretrainedModel,
        )

        text = BodyTensors("Qwen3ForCausalLM").shapes(config.text_config)
        shapes = {f"language_model.{name}": shape for name, shape in text.items()}
        with torch.device("meta"):
            tower = Qwen2VisionTransformerPretrainedModel(config.vision_config)
        for name, tensor in tower.state_dict().items():
            shape = tuple(tensor.shape)
            if name.startswith("merger."):
                if name.startswith("merger.mlp.2."):
                    shape = (config.text_config.hidden_size, *shape[1:])
                shapes["vision_abstractor.projection." + name.removeprefix("merger.")] = shape
            else:
                shapes[f"vision_model.{name}"] = shape
        return shapes


class MinerUEngineConfig(MaskedEngineConfig):
    """The entry of ``MinerUDiffusionForConditionalGeneration``."""

    rules = {"reveal": PublishedRule(Reveal, {"reveal_threshold": 0.95, "strategy": "dynamic"})}
    mask_token_id = 151669
    block_length = 32
    layout = BlockAfterPrompt
    end_texts = ("<|endoftext|>", "<|im_end|>")
    tensors = MinerUTensors()

    @classmethod
    def check_model(cls, model_config: ModelConfig) -> None:
        super().check_model(model_config)
        from vllm_diffusion.families.mineru.pictures import image_processor

        config, vocab_size = model_config.hf_config, model_config.get_vocab_size()
        if not (type(config.image_token_id) is int and 0 <= config.image_token_id < vocab_size):
            raise ValueError(
                f"image_token_id={config.image_token_id!r} of the checkpoint must be an integer of at least 0 and "
                f"below vocab_size={vocab_size}; correct it in config.json."
            )
        try:
            image_processor(model_config.model, revision=model_config.revision)
        except OSError as error:
            raise ValueError(
                f"preprocessor_config.json of {model_config.model} could not be read; it says how pictures are cut into "
                "patches. Copy it from the published checkpoint."
            ) from error
        if config.tower not in (_TOWER, Qwen2VLVisionConfig.model_type):
            raise ValueError(
                f"vision_config.model_type={config.tower!r} in config.json of the checkpoint is not served; "
                f'the tower of MinerU-Diffusion is "{_TOWER}".'
            )
        merge = config.vision_config.spatial_merge_size
        if not re.fullmatch(rf"(patch_merger|pm){merge}x", config.vision_projector_type):
            raise ValueError(
                f"vision_projector_type={config.vision_projector_type!r} in config.json of the checkpoint is not "
                f'served; with spatial_merge_size={merge} it must be "patch_merger{merge}x".'
            )
