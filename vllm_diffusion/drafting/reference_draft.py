"""DFlash draft in plain PyTorch.

The tensor names and the configuration are those of z-lab's checkpoints, which vLLM loads as
``DFlashDraftModel``. Embedding and output head are the target's. Training uses this class too
(``vllm_diffusion/drafting/calibration/train.py``).

Source: z-lab's DFlash (arXiv:2602.06036).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from vllm_diffusion.drafting.draft_check import STOCK_ARCHITECTURE
from vllm_diffusion.drafting.draft_fields import dflash_fields
from vllm_diffusion.weights.regular_files import why_not_folder
from vllm_diffusion.weights.weight_files import weight_files

# Keys and values of one layer, [B, num_kv_heads, T, head_dim] each, keys rotated.
KeysValues = tuple[Tensor, Tensor]


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Choose the layers of the target whose outputs a draft reads, one for each layer of the draft.

    A draft of one layer reads the middle layer; a deeper draft reads layers spread evenly from 1 to
    the third from the end. A configuration may name other layers, and any number of them.

    Args:
        num_target_layers: Number of layers of the target.
        num_draft_layers: Number of layers of the draft.

    Returns:
        Layer indices, rising, counted from 0.

    Raises:
        ValueError: If the target has too few layers for as many different ones.
    """
    if num_draft_layers < 1 or num_target_layers < 3:
        raise ValueError(
            f"num_draft_layers={num_draft_layers} and num_target_layers={num_target_layers}: a draft "
            "has at least 1 layer and its target at least 3."
        )
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    if num_draft_layers > last - first + 1:
        raise ValueError(
            f"num_draft_layers={num_draft_layers}: a target of {num_target_layers} layers has "
            f"{max(0, last - first + 1)} from layer 1 to the third from the end; take fewer, or name "
            "target_layer_ids."
        )
    gap = (last - first) / (num_draft_layers - 1)
    return [round(first + i * gap) for i in range(num_draft_layers)]


def check_target_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Raise ``ValueError`` unless a draft can read these layers of its target.

    A draft cannot read the last layer: ``transformers`` gives its output after the model's last
    norm, vLLM before it.

    Args:
        layer_ids: ``dflash_config.target_layer_ids``.
        num_target_layers: Number of layers of the target.
    """
    known = range(num_target_layers - 1)
    wrong = [i for i in layer_ids if i not in known]
    if not layer_ids or wrong or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(
            f"target_layer_ids={list(layer_ids)} must be different layers of a target that has "
            f"{num_target_layers}, each of 0..{num_target_layers - 2}."
        )


def draft_config(
    target: PreTrainedConfig,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None,
    window: int | None = None,
    architecture: str = STOCK_ARCHITECTURE,
) -> Qwen3Config:
    """Make the configuration of a new draft, in z-lab's layout.

    Args:
        target: Text configuration of the target, whose sizes the draft takes.
        num_layers: Number of layers of the draft.
        block_size: Positions of a block, anchor and masks; vLLM's ``num_speculative_tokens`` is one
            less.
        mask_token_id: A token of the target's vocabulary that no text has.
        target_layer_ids: Layers that the draft reads; by default :func:`build_target_layer_ids`.
        window: Positions that a row sees back and ahead, itself included; ``None`` for all.
        architecture: ``DFlashDraftModel``, or ``DFlashMaskedDraftModel`` for several passes.

    Raises:
        ValueError: If the layers or the mask token are not the target's, or a block has no mask.
    """
    if target_layer_ids is None:
        target_layer_ids = build_target_layer_ids(target.num_hidden_layers, num_layers)
    check_target_layer_ids(target_layer_ids, target.num_hidden_layers)
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(
            f"mask_token_id={mask_token_id} must be a token of the target's: 0..{target.vocab_size - 1}."
        )
    if block_size < 2:
        raise ValueError(f"block_size={block_size} must be at least 2: an anchor and a mask.")
    heads = target.num_attention_heads
    dflash = {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)}
    if window is not None:
        dflash |= {"use_swa": True, "swa_window_size": window, "causal": False}
    rope = getattr(target, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    return Qwen3Config(
        architectures=[architecture],
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        # A target whose layers rotate differently has a dictionary for each kind; a draft's are
        # alike.
        rope_parameters=rope if "rope_type" in rope else next(iter(rope.values())),
        layer_types=["full_attention"] * num_layers,
        tie_word_embeddings=False,
        block_size=block_size,
        num_target_layers=target.num_hidden_layers,
        dflash_config=dflash,
        dtype=target.dtype,
    )


def reach_of_layer(config: Qwen3Config, layer: int) -> tuple[int | None, bool]:
    """Read the range of a layer's rows as published drafts spell it and vLLM reads it.

    ``is_causal`` decides, else ``dflash_config.causal``, else a layer is causal if its type is
    ``sliding_attention``. A window is ``swa_window_size`` or ``sliding_window``, for layers of that
    type, and for all where ``use_swa`` is set and no type does.

    Returns:
        The number of positions that a row sees back, itself included, and ahead, ``None`` for all;
        and true if it sees none ahead.

    Raises:
        ValueError: If a layer has a window without a width.
    """
    options = dflash_fields(config)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    is_sliding = types[layer] == "sliding_attention"
    causal = getattr(config, "is_causal", None)
    if causal is None:
        causal = options.get("causal", is_sliding)
    if not is_sliding and not (options.get("use_swa") and "sliding_attention" not in types):
        return None, bool(causal)
    window = options.get("swa_window_size", config.sliding_window)
    if window is None:
        raise ValueError(
            "The draft's config.json gives no width of its window: set swa_window_size."
        )
    return window, bool(causal)


class DraftAttention(nn.Module):
    """Attention of a block's rows to their block and to the context before its anchor."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.reach = reach_of_layer(config, layer)
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        q, kv = (
            n * self.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _heads(self, rows: Tensor) -> Tensor:
        heads = rows.shape[-1] // self.head_dim
        return rows.view(*rows.shape[:2], heads, self.head_dim).transpose(1, 2)

    def keys_values(self, rows: Tensor, rotation: tuple[Tensor, Tensor]) -> KeysValues:
        """Compute keys and values of rows [B, T, hidden], the context's or the block's."""
        key = self.k_norm(self._heads(self.k_proj(rows)))
        return _rotated(key, rotation), self._heads(self.v_proj(rows))

    def forward(
        self, rows: Tensor, rotation: tuple[Tensor, Tensor], context: KeysValues, visible: Tensor
    ) -> Tensor:
        query = _rotated(self.q_norm(self._heads(self.q_proj(rows))), rotation)
        key, value = (
            torch.cat(pair, dim=2).repeat_interleave(self.groups, dim=1)
            for pair in zip(context, self.keys_values(rows, rotation), strict=True)
        )
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None])
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _rotated(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (each[:, None] for each in rotation)
    return heads * cos + rotate_half(heads) * sin


class DraftLayer(nn.Module):
    """One layer: attention, then a gated MLP, each after a norm."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, rows: Tensor, rotation: tuple[Tensor, Tensor], context: KeysValues, visible: Tensor
    ) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), rotation, context, visible)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class ReferenceDraft(nn.Module):
    """A DFlash draft without its target's embedding and head.

    Args:
        config: Result of :func:`draft_config`, or the configuration of a published draft.

    Raises:
        ValueError: If the configuration lacks ``dflash_config``, or has an option that is not
            supported.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__()
        options = dflash_fields(config)
        for name in ("mask_token_id", "target_layer_ids"):
            if options.get(name) is None:
                raise ValueError(f"The draft's config.json has no dflash_config.{name}.")
        # Options of published drafts that this file does not implement.
        unknown = [
            name for name in ("attention_sink_bias", "attention_value_scale") if options.get(name)
        ]
        if unknown or not getattr(config, "is_neox_style", True):
            raise ValueError(
                f"The reference has no {(unknown or ['interleaved rotation'])[0]}; vLLM serves such a "
                "draft, but it cannot be checked against the reference."
            )
        self.config = config
        self.mask_token_id: int = options["mask_token_id"]
        self.target_layer_ids: list[int] = list(options["target_layer_ids"])
        self.block_size: int = config.block_size
        width = getattr(config, "target_hidden_size", None) or config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * width, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers: Any = nn.ModuleList(
            DraftLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=config.initializer_range)

    def context(self, rows: Tensor, positions: Tensor) -> list[KeysValues]:
        """Compute each layer's keys and values of the target's hidden states.

        Args:
            rows: Result of :func:`.reference.context_rows`, [B, T, layers * hidden].
            positions: [B, T], int64.
        """
        features = self.hidden_norm(self.fc(rows))
        rotation = self.rotary_emb(features, positions)
        return [layer.self_attn.keys_values(features, rotation) for layer in self.layers]

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        anchors: Tensor,
        context: Sequence[KeysValues],
        context_positions: Tensor,
    ) -> Tensor:
        """Run one pass over blocks of the same sequences.

        Args:
            embeddings: Embeddings of the blocks' tokens by the target, [B, N, hidden].
            positions: Positions of these tokens in their sequence, [B, N], int64.
            anchors: Position of each row's anchor, which tells blocks apart, [B, N], int64.
            context: Result of :meth:`context`.
            context_positions: Positions of the context, [B, T], int64. A block sees those before
                its anchor.

        Returns:
            Hidden rows, [B, N, hidden]; the target's head gives logits of each row's own position.
        """
        distance = positions[:, :, None] - torch.cat([context_positions, positions], 1)[:, None]
        before = context_positions[:, None] < anchors[:, :, None]
        allowed = torch.cat([before, anchors[:, :, None] == anchors[:, None]], dim=2)
        rotation = self.rotary_emb(embeddings, positions)
        rows = embeddings
        for layer, keys_values in zip(self.layers, context, strict=True):
            window, causal = layer.self_attn.reach
            visible = allowed
            if window is not None:
                visible = visible & (distance.abs() < window)
            if causal:
                visible = visible & (distance >= 0)
            rows = layer(rows, rotation, keys_values, visible)
        return self.norm(rows)


def load_draft(folder: str | Path) -> ReferenceDraft:
    """Load a draft in z-lab's layout, for inference in float32.

    Raises:
        ValueError: If it is not a folder of files, or its tensors do not fit its configuration.
    """
    folder = Path(folder)
    if problem := why_not_folder(folder):
        raise ValueError(f"{folder} {problem}.")
    draft = ReferenceDraft(Qwen3Config.from_pretrained(folder)).float()
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors |= load_file(path)
    try:
        missing, unexpected = draft.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        # torch's lines after the first have a tensor of another size each.
        misfit = str(error).splitlines()[-1].strip()
        raise ValueError(f"{folder} is not a draft of its config.json: {misfit}") from None
    if missing or unexpected:
        raise ValueError(
            f"{folder} is not a draft of its config.json: "
            f"it lacks {missing[:3]} and has {unexpected[:3]} besides."
        )
    return draft.eval()


def save_draft(
    draft: ReferenceDraft, folder: str | Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write ``config.json`` and ``model.safetensors`` as vLLM, SGLang and z-lab's own code load
    them.

    Args:
        draft: Draft to save, on any device.
        folder: Folder to write to, made if absent.
        dtype: Type of the tensors in the file. A server computes in the ``dtype`` of
            ``config.json``.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.to("cpu", dtype).contiguous() for name, t in draft.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(draft.config.to_dict(), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
