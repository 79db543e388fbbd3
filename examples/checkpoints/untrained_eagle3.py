"""Configuration of an EAGLE-3 draft without weights, for a target of Qwen3 or Llama."""

import json
from pathlib import Path
from typing import Any

# Fields of the target that the draft shares, needed ones first.
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
_SHARED = (
    *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


def untrained_eagle3(target: Path, folder: Path, num_drafts: int) -> dict[str, Any]:
    """Write the configuration of an EAGLE-3 draft of one layer that reads three layers of its
    target.

    Its weights are random, and so are its proposals: it shows what a draft of this kind costs.
    vLLM makes its weights up (``load_format: dummy``); embedding and head are the target's.

    Args:
        target: A checkpoint of Qwen3 or Llama.
        folder: Folder to write to, made if absent.
        num_drafts: Tokens of a proposal.

    Returns:
        The ``--speculative-config`` that serves it.

    Raises:
        ValueError: If the target is not a language model with attention heads and at least four
            layers.
    """
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    missing = [name for name in (*_NEEDED, "num_hidden_layers") if name not in config]
    if missing or config["num_hidden_layers"] < 4:
        lacks = f"no {missing[0]} in its config.json" if missing else "fewer than four layers"
        raise ValueError(f"{target} has {lacks}; name an EAGLE-3 draft.")
    num_layers = config["num_hidden_layers"]
    ours = {name: config[name] for name in (*_NEEDED, *_SHARED) if name in config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "head_dim": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        "draft_vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        # An early one, one in the middle, a late one, counted from 1.
        "eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    return {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": num_drafts,
        "draft_load_config": {"load_format": "dummy"},
    }
