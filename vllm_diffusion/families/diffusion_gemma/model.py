"""DiffusionGemma on vLLM's Gemma 4 backbone: one set of weights, used as encoder and decoder.

Which of the two a row of a forward pass is, the state decides (causal or canvas rows); it also
applies :class:`SelfConditioning` to canvas rows. This file holds layers and weight names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, DiffusionGemmaConfig
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.config_utils import is_equal_or_regex_match
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.gemma4 import Gemma4DecoderLayer, Gemma4Model
from vllm.model_executor.models.gemma4_mm import (
    Gemma4DummyInputsBuilder,
    Gemma4ForConditionalGeneration,
    Gemma4MultimodalEmbedder,
    Gemma4MultiModalProcessor,
    Gemma4ProcessingInfo,
)
from vllm.model_executor.models.interfaces import SupportsLoRA, SupportsMultiModal, SupportsQuant
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.transformers.utils import recursive_replace_linear
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_diffusion.families.diffusion_gemma.adapters import (
    EncoderDecoderAdapters,
    EncoderDecoderLora,
)
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.adapters import checking_manager
from vllm_diffusion.weights.adapters.checking_manager import Adaptable
from vllm_diffusion.weights.checkpoint_tensors import spell_out_patterns
from vllm_diffusion.weights.formats import FLOATS
from vllm_diffusion.weights.loading import checked_loading
from vllm_diffusion.weights.weight_files import stored_tensors, weight_files

# A tower is quantised only where its matrices divide into the blocks of the quantised formats.
_TOWER_BLOCK = 64


class SelfConditioning(nn.Module):
    """Adds the previous step's soft embedding to canvas embeddings through a gated MLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()

        def linear(in_size: int, out_size: int, name: str) -> ReplicatedLinear:
            return ReplicatedLinear(
                in_size,
                out_size,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.{name}",
                return_bias=False,
            )

        self.pre_norm = RMSNorm(hidden_size, eps=eps)
        self.gate_proj = linear(hidden_size, intermediate_size, "gate_proj")
        self.up_proj = linear(hidden_size, intermediate_size, "up_proj")
        self.down_proj = linear(intermediate_size, hidden_size, "down_proj")
        self.post_norm = RMSNorm(hidden_size, eps=eps, has_weight=False)

    def forward(self, canvas_embeds: Tensor, signal: Tensor) -> Tensor:
        """Condition canvas rows; a zero signal still normalises them.

        Args:
            canvas_embeds: [num_rows, hidden_size], scaled token embeddings.
            signal: [num_rows, hidden_size], soft embedding of the previous step, or zeros.

        Returns:
            [num_rows, hidden_size].
        """
        x = self.pre_norm(signal)
        gated = F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        return self.post_norm(canvas_embeds + self.down_proj(gated))


def _stores_floats(model_config: ModelConfig) -> bool:
    """Return true if a checkpoint holds self-conditioning in floats, as far as can be known.

    vLLM's own class never quantises it, so that a recipe may leave it out of its ignore list.
    """
    folder = Path(model_config.model)
    if model_config.model_arch_config.quantization_config is None:
        return True
    if not folder.is_dir():
        return False
    matrices = [
        one.dtype
        for one in stored_tensors(weight_files(folder))
        if ".self_conditioning." in one.name and "_proj.weight" in one.name
    ]
    return bool(matrices) and set(matrices) <= set(FLOATS)


class TwoScalarLayer(Gemma4DecoderLayer):
    """Layer whose outputs the encoder and the decoder multiply by scalars of their own, row by
    row.
    """

    @classmethod
    def adopt(cls, layer: Any, is_decoder_row: Tensor) -> None:
        """Make a layer one of these.

        Args:
            layer: A layer with both scalars.
            is_decoder_row: [max_num_tokens], bool: rows of the pass that are the decoder's.
        """
        layer.__class__ = cls
        layer.register_buffer("is_decoder_row", is_decoder_row, persistent=False)
        layer.register_buffer("encoder_scalar", layer.layer_scalar.clone(), persistent=False)
        # By which vLLM's layer multiplies.
        layer.layer_scalar.fill_(1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's layer, [num_tokens, hidden_size], and multiply by each row's scalar."""
        hidden_states, residual = super().forward(*args, **kwargs)
        is_decoders = self.is_decoder_row[: hidden_states.shape[0], None]
        scalar = torch.where(is_decoders, self.decoder_scalar, self.encoder_scalar)
        return hidden_states * scalar, residual


# The stack and the number of a layer that has a scalar.
_SCALAR = re.compile(r"^model\.(decoder|encoder\.language_model)\.layers\.(\d+)\.layer_scalar$")


@dataclass(frozen=True)
class _Scalars:
    """Tensors of a layer that the passes read, at addresses that stay.

    Attributes:
        stock: Scalar by which vLLM's layer multiplies; the encoder's too where the two are one.
        are_two: True if encoder and decoder have scalars of their own.
    """

    stock: Tensor
    encoder: Tensor
    decoder: Tensor
    are_two: bool

    @classmethod
    def of(cls, layer: Any) -> _Scalars:
        """Take those of a layer."""
        are_two = isinstance(layer, TwoScalarLayer)
        encoder = layer.encoder_scalar if are_two else layer.layer_scalar
        return cls(layer.layer_scalar, encoder, layer.decoder_scalar, are_two)


class DiffusionGemmaProcessingInfo(Gemma4ProcessingInfo):
    """Gemma 4's multimodal processing under DiffusionGemma's config; there is no audio tower."""

    def get_hf_config(self) -> DiffusionGemmaConfig:
        return self.ctx.get_hf_config(DiffusionGemmaConfig)

    def has_audio(self) -> bool:
        return False


@MULTIMODAL_REGISTRY.register_processor(
    Gemma4MultiModalProcessor,
    info=DiffusionGemmaProcessingInfo,
    dummy_inputs=Gemma4DummyInputsBuilder,
)
class DiffusionGemmaForBlockDiffusion(
    Adaptable, nn.Module, SupportsLoRA, SupportsMultiModal, SupportsQuant
):
    """The model that vLLM builds for the architecture of the same name."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_regex={
            re.compile(r"^model\.decoder\.(layers\.\d+)\.layer_scalar$"): r"model.\1.decoder_scalar"
        },
        orig_to_new_prefix={
            "model.decoder.self_conditioning.": "self_conditioning.",
            # Only adapters have this name.
            "model.self_conditioning.": "self_conditioning.",
            "model.decoder.": "model.",
            "model.encoder.language_model.": "model.",
            "model.encoder.vision_tower.": "vision_tower.",
            "model.encoder.embed_vision.": "embed_vision.",
        },
    )
    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    is_3d_moe_weight = True
    # A checkpoint has at least one of these: the encoder's scalar of a layer, and the decoder's.
    loaded_buffers = ("layer_scalar", "decoder_scalar")
    # Otherwise vLLM's own state leaves out pictures that are larger than the window.
    mm_prefix_clamp_sliding_window = True
    adapter_manager = EncoderDecoderAdapters
    adapter_weights = EncoderDecoderLora

    # Images are Gemma 4's, from parsing to embedding. Its methods are borrowed one by one because
    # its constructor builds a language model of its own.
    embed_multimodal = Gemma4ForConditionalGeneration.embed_multimodal
    _parse_and_validate_image_input = Gemma4ForConditionalGeneration._parse_and_validate_image_input
    _parse_and_validate_video_input = Gemma4ForConditionalGeneration._parse_and_validate_video_input
    _parse_and_validate_multimodal_inputs = (
        Gemma4ForConditionalGeneration._parse_and_validate_multimodal_inputs
    )
    _process_image_input = Gemma4ForConditionalGeneration._process_image_input
    _process_video_input = Gemma4ForConditionalGeneration._process_video_input
    _get_max_soft_tokens = Gemma4ForConditionalGeneration._get_max_soft_tokens
    _encoder_chunk = staticmethod(Gemma4ForConditionalGeneration._encoder_chunk)

    def get_model_state_cls(self) -> type:
        """The state that embeds canvases; vLLM's own in the autoregressive mode."""
        from vllm_diffusion.families.diffusion_gemma.state import DiffusionGemmaModelState

        return DiffusionGemmaModelState if self._is_diffusion else DefaultModelState

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        placeholders = {"image": "<|image|>", "video": "<|video|>"}
        if modality not in placeholders:
            raise ValueError(f"DiffusionGemma takes images and videos, not {modality}.")
        return placeholders[modality]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        checking_manager.install()
        super().__init__()
        config = vllm_config.model_config.hf_config
        text_config = vllm_config.model_config.hf_text_config
        quant_config = vllm_config.quant_config
        spell_out_patterns(quant_config, config, DiffusionGemmaTensors(), self.hf_to_vllm_mapper)
        _ignore_values_with_keys(quant_config, text_config)
        self.config = config
        self._is_diffusion = vllm_config.model_config.is_diffusion
        self.model_dtype = vllm_config.model_config.dtype
        # Read by the borrowed image methods.
        self.multimodal_config = vllm_config.model_config.multimodal_config
        self._enable_mm_lora = False
        self._build_vision(vllm_config, prefix)

        # Full-attention layers have no v_proj: their values are their keys before normalisation.
        text_config.attention_k_eq_v = True
        self.model = Gemma4Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.is_decoder_row: Tensor | None = None
        self._max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        for layer in self._layers().values():
            layer.register_buffer("decoder_scalar", torch.ones(1))
            # A token of a picture sees all of it, beyond the window too, which Gemma 4's does not.
            layer.self_attn.attn.mm_prefix_clamp_sliding_window = False
        head = ParallelLMHead(
            text_config.vocab_size,
            text_config.hidden_size,
            quant_config=quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        is_tied = text_config.tie_word_embeddings
        self.lm_head = head.tie_weights(self.model.embed_tokens) if is_tied else head
        # Softcapping comes after the product, in float32.
        self.logits_processor = LogitsProcessor(text_config.vocab_size)
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.self_conditioning = SelfConditioning(
            text_config.hidden_size,
            getattr(config, "self_conditioning_size", None) or text_config.intermediate_size,
            text_config.rms_norm_eps,
            None if _stores_floats(vllm_config.model_config) else quant_config,
            maybe_prefix(prefix, "self_conditioning"),
        )

    def _build_vision(self, vllm_config: VllmConfig, prefix: str) -> None:
        self.vision_tower: nn.Module | None = None
        self.embed_vision: nn.Module | None = None
        vision_config = getattr(self.config, "vision_config", None)
        if vision_config is None:
            return
        quant_config = vllm_config.quant_config
        divides = (
            vision_config.hidden_size % _TOWER_BLOCK == 0
            and vision_config.intermediate_size % _TOWER_BLOCK == 0
        )
        # Compressed-tensors decides by its own list of ignored modules.
        if quant_config is not None and quant_config.get_name() != "compressed-tensors":
            quant_config = quant_config if divides else None
        with self._mark_tower_model(vllm_config, {"image", "video"}):  # type: ignore[operator]
            self.vision_tower = AutoModel.from_config(config=vision_config)
            self.embed_vision = Gemma4MultimodalEmbedder(
                vision_config,
                vllm_config.model_config.hf_text_config,
                quant_config=quant_config,
                prefix=maybe_prefix(prefix, "embed_vision"),
            )
            recursive_replace_linear(
                self.vision_tower, quant_config, prefix=maybe_prefix(prefix, "vision_tower")
            )

    def get_mm_mapping(self) -> MultiModelKeys:
        return MultiModelKeys.from_string_field(
            language_model="model", connector=["embed_vision"], tower_model=["vision_tower"]
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the layers, and return [num_tokens, hidden_size]."""
        return self.model(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Softcapped logits, for ``prompt_logprobs``; the sampler projects its rows itself.

        Args:
            hidden_states: [num_rows, hidden_size].

        Returns:
            [num_rows, vocab_size], float32; the cap is applied in float32.
        """
        logits = self.logits_processor(self.lm_head, hidden_states).float()
        if self.softcap is None:
            return logits
        # In place: vLLM asks for 1,024 rows at once, a GiB, which its memory profile knows nothing
        # of.
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        is_first = not hasattr(self, "_was_loaded")
        with checked_loading(self, weights) as checked:
            loaded: set[str] = AutoWeightsLoader(self).load_weights(
                checked if is_first else self._with_scalars(checked), mapper=self.hf_to_vllm_mapper
            )
        if is_first:
            for i, layer in self._layers().items():
                self._take_scalars(layer, f"model.layers.{i}", loaded)
            self._scalars = {i: _Scalars.of(layer) for i, layer in self._layers().items()}
        return loaded

    def _layers(self) -> dict[int, Any]:
        """The layers by number."""
        return dict(enumerate(self.model.layers))

    def _take_scalars(self, layer: Any, name: str, loaded: set[str]) -> None:
        """Give a layer the scalars that were loaded; one that comes alone is both."""
        is_encoders = f"{name}.layer_scalar" in loaded
        is_decoders = f"{name}.decoder_scalar" in loaded
        if is_encoders and not is_decoders:
            layer.decoder_scalar.copy_(layer.layer_scalar)
        elif is_decoders and not is_encoders:
            layer.layer_scalar.copy_(layer.decoder_scalar)
        elif is_encoders and not torch.equal(layer.layer_scalar, layer.decoder_scalar):
            if self.is_decoder_row is None:
                device = layer.layer_scalar.device
                self.is_decoder_row = torch.zeros(
                    self._max_num_tokens, dtype=torch.bool, device=device
                )
            TwoScalarLayer.adopt(layer, self.is_decoder_row)

    def _with_scalars(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield new weights; write layers' scalars where the passes read them.

        vLLM loads a layer anew once it has all of its tensors. So a scalar is passed on under both
        names, since the other one may come later, in a call of its own, or never.

        Raises:
            ValueError: If an update parts the two, which the passes of a running server do not tell
                apart.
        """
        came: dict[int, float] = {}
        for name, tensor in weights:
            match = _SCALAR.search(name)
            held = self._scalars.get(int(match[2])) if match else None
            if match is None or held is None:
                yield name, tensor
                continue
            layer, is_encoders = int(match[2]), match[1] != "decoder"
            if not held.are_two and came.setdefault(layer, float(tensor)) != float(tensor):
                raise ValueError(
                    f"The encoder's layer_scalar of layer {layer} differs from the decoder's in this update, but not in "
                    "the checkpoint that is served; start the server with the new checkpoint."
                )
            encoder, decoder = held.encoder.clone(), held.decoder.clone()
            yield f"model.encoder.language_model.layers.{layer}.layer_scalar", tensor
            yield f"model.decoder.layers.{layer}.layer_scalar", tensor
            held.stock.fill_(1)
            held.encoder.copy_(tensor if is_encoders or not held.are_two else encoder)
            held.decoder.copy_(decoder if is_encoders and held.are_two else tensor)


def _ignore_values_with_keys(quant_config: QuantizationConfig | None, text_config: Any) -> None:
    """Leave the values of full-attention layers unquantised where an ignore list names their keys.

    Such a layer has no ``v_proj``, so no list names it, and vLLM makes one matrix of queries, keys
    and values: it refuses to quantise a part of it.
    """
    for attribute in ("ignore", "ignored_layers", "exclude_modules"):
        entries = getattr(quant_config, attribute, None)
        if not isinstance(entries, list):
            continue
        for layer, kind in enumerate(text_config.layer_types):
            keys = f"model.layers.{layer}.self_attn.k_proj"
            # What a wildcard of modelopt's excludes is the joined matrix.
            is_named = keys in entries or (
                attribute != "exclude_modules"
                and any(is_equal_or_regex_match(keys, one, use_fnmatch=True) for one in entries)
            )
            if kind == "full_attention" and is_named:
                entries.append(keys.replace("k_proj", "v_proj"))
