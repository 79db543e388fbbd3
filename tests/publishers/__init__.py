"""Publishers' own files as the oracle: nobody here wrote them, and nothing of them is copied here.

    VLLM_DIFFUSION_PUBLISHERS=FOLDER pytest tests/publishers -m slow

FOLDER holds checkouts under the names of their repositories: ``LLaDA`` (ML-GSAI/LLaDA at b7e6c35),
``dllm`` (ZHZisZZ/dllm at ca17675, which has the modeling files of LLaDA's and Dream's
checkpoints), ``SDAR`` (JetAstra/SDAR at c2041a8), ``Automodel`` (NVIDIA-NeMo/Automodel's wheel
0.7.0, unpacked), ``MinerU-Diffusion`` (opendatalab/MinerU-Diffusion at 8d456f1),
``CoDA`` (SalesforceAIResearch/CoDA at fa1d505), ``RND1`` (RadicalNumerics/RND1 at 87d5f46),
``uno`` (ifm-ai/uno at 9018a5d),
``dllm-research`` (monash-yann/dllm-research at ecd7cd2, which has small files of Dream's and
LLaDA's), ``DualDiffusion`` (Satgoy152/DualDiffusion at 9587d1e, which has those of Fast-dLLM v2's),
``DARE`` (Xenearkr/DARE at ac55266, which has those of LLaDA2.x's and of more SDARs),
``diffusiongemma-26b-nvfp4-sm121-vllm`` (r0b0tlab's at c255963, which has the hub's answer about
NVIDIA's DiffusionGemma) and ``speculators-env`` (no checkout, but a virtual environment with
speculators 0.9.0). Without one a test is skipped by its name. Toy weights go into the
publisher's class under the published names; it generates with its own loop, in float32, and the
engine's tokens are compared with it, in one batch.
"""

import importlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines.engine import TracedEngine, tokens_of
from tests.support.families.model import MASK_ID, TinyModel

VARIABLE = "VLLM_DIFFUSION_PUBLISHERS"
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8}


def checkout(name: str) -> Path:
    """A publisher's checkout; skips the test without it."""
    folder = Path(os.environ.get(VARIABLE, "")) / name
    if VARIABLE not in os.environ or not folder.is_dir():
        pytest.skip(f"{VARIABLE} names no folder with a checkout {name}")
    return folder


def modules_of(folder: Path, name: str) -> Callable[[str], Any]:
    """Import modules of a folder as those of one package, without what is above it.

    Args:
        folder: The folder.
        name: A name for the package.
    """
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    return lambda module: importlib.import_module(f"{name}.{module}")


def fields_of(toy: TinyModel) -> dict[str, Any]:
    """What a publisher's configuration class takes of a toy's ``config.json``."""
    own = ("architectures", "auto_map", "model_type", "torch_dtype")
    return {name: value for name, value in toy.config.items() if name not in own}


def with_weights(body: Any, toy: TinyModel) -> Any:
    """A publisher's model with a toy's weights, in float32."""
    body = body.float().eval()
    body.load_state_dict(toy.tensors())
    return body


def forbid_mask(head: torch.nn.Module) -> None:
    """Take the mask token out of what a head gives."""
    head.register_forward_hook(lambda module, inputs, output: without_mask(output))


def without_mask(logits: Tensor) -> Tensor:
    """No publisher's loop forbids the mask token; every engine must."""
    logits = logits.clone()
    logits[..., MASK_ID] = -torch.inf
    return logits


def default_rope(config: Any, device: Any = None, seq_len: Any = None) -> tuple[Tensor, float]:
    """Frequencies of a rotary embedding that is not scaled, which transformers 5 has elsewhere."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.rope_theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0


def keys_and_values(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """What ``DynamicCache.__getitem__`` gave before transformers 5."""
    return cache.layers[layer].keys, cache.layers[layer].values


def answers(
    folder: Path, requests: list[tuple[Any, int, dict[str, Any]]], **options: Any
) -> list[list[int]]:
    """The engine's answers, all in one batch: prompt, tokens and arguments of each, greedy if they
    set nothing else.

    Arguments without ``diffusion_`` in front of their names are vLLM's. A prompt is token ids, or
    what vLLM takes for one.
    """
    from vllm import SamplingParams

    params = []
    for _, num_tokens, arguments in requests:
        own = {name: value for name, value in arguments.items() if name.startswith("diffusion_")}
        rest = {name: value for name, value in arguments.items() if name not in own}
        settings = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True} | rest
        params.append(SamplingParams(**settings, detokenize=False, extra_args=own))
    prompts = [
        prompt if isinstance(prompt, dict) else {"prompt_token_ids": prompt}
        for prompt, *_ in requests
    ]
    with TracedEngine(folder, **OPTIONS | options) as engine:
        return tokens_of(engine.llm.generate(prompts, params, use_tqdm=False))
