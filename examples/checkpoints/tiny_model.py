"""The shipped tiny DiffusionGemma: its configuration, byte tokenizer, chat template, processor.

Everything that ``transformers`` and vLLM read beside the weights is made here, so a checkpoint is
reproducible from this file and a seed. The class names and control tokens are those of the
published model; only the sizes differ. Every matrix dimension is a multiple of 32, so the
checkpoint can be quantised to FP8 and NVFP4 like the big one.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
)

CANVAS_LENGTH = 32
SLIDING_WINDOW = 24
# A multiple of 64: 256 bytes, the control tokens, and named spares.
VOCAB_SIZE = 320
# Soft tokens per image: the smallest number that Gemma 4's image processor accepts.
MAX_SOFT_TOKENS = 70
# Half the published patch side; 3 x 3 patches make one soft token, as published.
PATCH_SIZE = 8
POOLING_KERNEL_SIZE = 3
MAX_POSITION_EMBEDDINGS = 4096

# Order is identity: position in this list is the token id. The first four ids are Gemma's.
CONTROL_TOKENS = [
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|channel>"),
    *("<channel|>", "<|think|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|image>", "<|image|>", "<image|>"),
    *("<|audio>", "<|audio|>", "<audio|>", "<|video|>"),
]
TOKEN_ID = {token: idx for idx, token in enumerate(CONTROL_TOKENS)}
# Words of their own, where they stand alone: vLLM's decisions read a question's answer from the
# probability of one token.
ANSWER_TOKENS = ["yes", "no"]

# The empty thought that the published template writes when thinking is off.
EMPTY_THOUGHT = "<|channel>thought\n<channel|>"

# Written for this checkpoint, in the form of the published one: turns in <|turn>role ... <turn|>,
# thinking asked for by <|think|> in the system turn, tools declared there, the thoughts of earlier
# turns left out. Tool arguments and results use <|"|> as the string delimiter.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")

GENERATION_CONFIG = {
    "bos_token_id": TOKEN_ID["<bos>"],
    "eos_token_id": [TOKEN_ID["<eos>"], TOKEN_ID["<turn|>"], TOKEN_ID["<|tool_response>"]],
    "pad_token_id": TOKEN_ID["<pad>"],
    "max_denoising_steps": 16,
    "t_min": 0.4,
    "t_max": 0.8,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}


def build_config() -> DiffusionGemmaConfig:
    """The architecture: 4 layers, 4 experts of which 2 are used, K=V on full-attention layers."""
    text_config = DiffusionGemmaTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        num_global_key_value_heads=1,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=128,
        use_bidirectional_attention="vision",
        pad_token_id=TOKEN_ID["<pad>"],
        eos_token_id=TOKEN_ID["<eos>"],
        bos_token_id=TOKEN_ID["<bos>"],
        dtype="float32",
    )
    vision_config = Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        pooling_kernel_size=POOLING_KERNEL_SIZE,
        patch_size=PATCH_SIZE,
        # Patch coordinates of the longest strip that 70 soft tokens allow (210) stay below this.
        position_embedding_size=256,
        default_output_length=MAX_SOFT_TOKENS,
        standardize=True,
        dtype="float32",
    )
    return DiffusionGemmaConfig(
        text_config=text_config,
        vision_config=vision_config,
        boi_token_id=TOKEN_ID["<|image>"],
        eoi_token_id=TOKEN_ID["<image|>"],
        image_token_id=TOKEN_ID["<|image|>"],
        canvas_length=CANVAS_LENGTH,
        tie_word_embeddings=True,
        architectures=["DiffusionGemmaForBlockDiffusion"],
        eos_token_id=[TOKEN_ID["<eos>"], TOKEN_ID["<turn|>"]],
        dtype="float32",
    )


def build_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte (byte-level BPE without merges), control tokens, "yes", "no" and
    each of ``phrases``.

    Any string without control tokens round-trips exactly. ``<bos>`` is not added: the chat
    template writes it.
    """
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*CONTROL_TOKENS, *byte_symbols, *ANSWER_TOKENS, *phrases]
    names += [f"<unused{idx}>" for idx in range(VOCAB_SIZE - len(names))]
    backend = Tokenizer(
        models.BPE(vocab={name: idx for idx, name in enumerate(names)}, merges=[], unk_token=None)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = CONTROL_TOKENS + [name for name in names if name.startswith("<unused")]
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    backend.add_tokens(
        [
            AddedToken(name, special=False, normalized=False, single_word=True)
            for name in ANSWER_TOKENS
        ]
    )
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in phrases])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        mask_token="<mask>",
        extra_special_tokens={
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
            "soc_token": "<|channel>",
            "eoc_token": "<channel|>",
            "think_token": "<|think|>",
            "std_token": "<|tool>",
            "etd_token": "<tool|>",
            "stc_token": "<|tool_call>",
            "etc_token": "<tool_call|>",
            "str_token": "<|tool_response>",
            "etr_token": "<tool_response|>",
            "escape_token": '<|"|>',
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "audio_token": "<|audio|>",
            "eoa_token": "<audio|>",
        },
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=MAX_POSITION_EMBEDDINGS,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast):
    """Gemma 4's processor at 70 soft tokens per image.

    Gemma4Processor insists on audio and video parts; the model has no audio tower.
    """
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    image_kwargs = {
        "patch_size": PATCH_SIZE,
        "max_soft_tokens": MAX_SOFT_TOKENS,
        "pooling_kernel_size": POOLING_KERNEL_SIZE,
    }
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(**image_kwargs),
        video_processor=Gemma4VideoProcessor(**image_kwargs),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        image_seq_length=MAX_SOFT_TOKENS,
    )


def save_checkpoint(model, directory: str | Path) -> None:
    """Write weights, configuration, tokenizer and processor, each file moved in when complete.

    Args:
        model: A ``DiffusionGemmaForBlockDiffusion`` in fp32.
        directory: Made if absent. A reader never sees half a file.
    """
    with moved_in_when_complete(directory) as staging:
        model.save_pretrained(staging)
        build_processor(build_tokenizer()).save_pretrained(staging)
        # Written by hand: the reader of the published file finds the same keys in the same form.
        (staging / "generation_config.json").write_text(
            json.dumps(GENERATION_CONFIG, indent=2) + "\n"
        )
        _write_published_layer_keys(staging / "config.json")


@contextlib.contextmanager
def moved_in_when_complete(directory: str | Path) -> Iterator[Path]:
    """A folder beside ``directory`` whose files are moved there, over older ones, at the end."""
    directory = Path(directory)
    staging = directory.with_name(directory.name + ".partial")
    staging.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    yield staging
    for path in sorted(staging.iterdir()):
        path.chmod(0o644)
        os.replace(path, directory / path.name)
    staging.rmdir()


def _write_published_layer_keys(path: Path) -> None:
    """Name the full-attention sizes as the published config does, not layer by layer."""
    config = json.loads(path.read_text())
    text_config = config["text_config"]
    (sizes,) = {tuple(sorted(v.items())) for v in text_config.pop("per_layer_config").values()}
    text_config["global_head_dim"] = dict(sizes)["head_dim"]
    text_config["num_global_key_value_heads"] = dict(sizes)["num_key_value_heads"]
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
