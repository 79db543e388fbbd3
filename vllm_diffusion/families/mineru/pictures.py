"""Pictures of MinerU-Diffusion: Qwen2-VL's, without videos, resized by Pillow as its publisher has
it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import (
    ProcessorMixin,
    Qwen2VLProcessor,
)
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.qwen2_vl import Qwen2VLDummyInputsBuilder, Qwen2VLProcessingInfo
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems

# The bound of Qwen2-VL's ``smart_resize``.
_LONGEST_SIDE = 200

image_processor = lru_cache(Qwen2VLImageProcessorPil.from_pretrained)


class PictureProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor without its videos."""

    def __init__(self, image_processor: Any, tokenizer: Any, image_token_id: int) -> None:
        """Name the token that stands for a picture by the number in ``config.json``."""
        self.image_token_id = image_token_id
        self.image_token = tokenizer.convert_ids_to_tokens(image_token_id)
        # vLLM's code for Qwen2-VL asks for it before it finds no video.
        self.video_token_id, self.video_token = self.image_token_id, self.image_token
        ProcessorMixin.__init__(self, image_processor, tokenizer)

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


class PictureInfo(Qwen2VLProcessingInfo):
    """What vLLM asks about pictures; the checkpoint's own processor is code that is not run."""

    def get_hf_processor(self, **kwargs: object) -> PictureProcessor:
        model = self.ctx.model_config
        pictures = image_processor(model.model, revision=model.revision)
        return PictureProcessor(pictures, self.get_tokenizer(), self.get_hf_config().image_token_id)

    def parse_mm_data(self, mm_data: Any, *, validate: bool = True) -> MultiModalDataItems:
        """Parse pictures, and refuse one of a shape that Qwen2-VL's processor refuses without its
        size.

        Raises:
            VLLMValidationError: If one side is more than 200 times the other.
        """
        items = super().parse_mm_data(mm_data, validate=validate)
        pictures = items.get("image")
        if isinstance(pictures, ImageProcessorItems):
            # One that is known by its id alone was cut before.
            held = [i for i in range(pictures.get_count()) if pictures.get(i) is not None]
            for width, height in map(pictures.get_image_size, held):
                if max(width, height) > _LONGEST_SIDE * min(width, height):
                    raise VLLMValidationError(
                        f"image_url has a picture of {width} x {height} pixels; its longer side may be at most "
                        f"{_LONGEST_SIDE} times the shorter. Crop it.",
                        parameter="image_url",
                    )
        return items

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {"image": self.get_max_image_tokens()}


class DummyPictures(Qwen2VLDummyInputsBuilder):
    """The largest pictures, by which vLLM measures memory."""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any
    ) -> dict[str, Any]:
        width, height = self.info.get_image_size_with_most_features()
        images = self._get_dummy_images(
            width=width,
            height=height,
            num_images=mm_counts.get("image", 0),
            overrides=mm_options.get("image"),
        )
        return {"image": images}
