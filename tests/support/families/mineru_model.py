"""MinerU-Diffusion's tiny model: a Qwen3 and the tower of Qwen2-VL with the publisher's
projector.
"""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.families import makers
from tests.support.families.model import TinyModel

# ``<|image|>`` of the shipped tokenizer.
IMAGE_ID = 18
# A token is 8 pixels wide and high.
_PATCH, _MERGE = 4, 2
VISION = {
    "model_type": "qwen2_vl",
    "depth": 2,
    "embed_dim": 32,
    # The publisher's projector takes the place of what this is the width of.
    "hidden_size": 80,
    "mlp_ratio": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
}
_PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": _PATCH,
    "merge_size": _MERGE,
    "temporal_patch_size": 2,
    "min_pixels": 4 * (_PATCH * _MERGE) ** 2,
    "max_pixels": 120 * (_PATCH * _MERGE) ** 2,
}
_TOP = ("architectures", "auto_map", "model_type", "mask_token_id", "torch_dtype")


class Body(nn.Module):
    """The modules under the publisher's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig

        super().__init__()
        self.language_model = makers.transformers_body("Qwen3")(config)
        vision = Qwen2VLVisionConfig(**{k: v for k, v in VISION.items() if k != "model_type"})
        vision._attn_implementation = "eager"
        self.vision_model = qwen2_vl.Qwen2VisionTransformerPretrainedModel(vision)
        self.vision_model.merger = nn.Identity()
        self.vision_abstractor = nn.Module()
        self.vision_abstractor.projection = qwen2_vl.PatchMerger(
            config["hidden_size"], vision.embed_dim, _MERGE
        )
        # [num_tokens, hidden_size]: those of the pictures of the sequence that is run.
        self.pictures: Tensor | None = None

    def forward(self, ids: Tensor, **kwargs: Any) -> Any:
        embeds = self.language_model.get_input_embeddings()(ids)
        if self.pictures is not None:
            # A generated one is a token like others.
            at = (ids[0] == IMAGE_ID).nonzero()[: len(self.pictures), 0]
            embeds[0, at] = self.pictures
        return self.language_model(inputs_embeds=embeds, **kwargs)


class MinerU(TinyModel):
    """The body, and how pictures come before it."""

    def __init__(self, maker: Any, config: dict[str, Any], block_length: int) -> None:
        super().__init__(maker, config, block_length)
        self.config = {name: config[name] for name in _TOP} | {
            "image_token_id": IMAGE_ID,
            "vision_projector_type": "patch_merger2x",
            "tie_word_embeddings": False,
            "text_config": {name: config[name] for name in config if name not in _TOP}
            | {"model_type": "sdar", "torch_dtype": config["torch_dtype"]},
            "vision_config": deepcopy(VISION),
        }

    def save(self, folder: Path) -> Path:
        super().save(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PICTURES, indent=2))
        return folder

    @torch.no_grad()
    def seeing(self, pictures: Sequence[Any]) -> Callable[[Tensor, Tensor], Tensor]:
        """The model of a sequence with these pictures, in order."""
        pixels, grid = processed(pictures)
        patches = self.body.vision_model(pixels, grid).last_hidden_state
        features = self.body.vision_abstractor.projection(patches)

        def model(ids: Tensor, visible: Tensor) -> Tensor:
            self.body.pictures = features
            try:
                return self(ids, visible)
            finally:
                self.body.pictures = None

        return model


def processed(pictures: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Patches of pictures, [num_patches, 96], and the time, height and width of each in patches,
    [n, 3].
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = {name: value for name, value in _PICTURES.items() if name != "image_processor_type"}
    made = Qwen2VLImageProcessorPil(**own)(images=list(pictures), return_tensors="pt")
    return made["pixel_values"], made["image_grid_thw"]


def num_tokens(picture: Any) -> int:
    """Tokens that a picture takes in a prompt."""
    return int(processed([picture])[1].prod()) // _MERGE**2


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A picture of random pixels."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator)
    return Image.fromarray(pixels.to(torch.uint8).numpy())


mineru = replace(
    makers.sdar,
    body=Body,
    block_length=32,
    block_length_key=None,
    config=makers.sdar.config
    | {
        "architectures": ["MinerUDiffusionForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_mineru_diffusion.MinerUDiffusionConfig",
            "AutoModel": "modeling_mineru_diffusion.MinerUDiffusionForConditionalGeneration",
        },
        "model_type": "mineru_diffusion",
    },
    kind=MinerU,
)
