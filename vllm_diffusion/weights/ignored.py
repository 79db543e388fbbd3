"""Ignore lists whose regular expressions refer to the checkpoint's module names."""

from __future__ import annotations

import re
from typing import Any

from vllm_diffusion.weights.tensor_rules import TensorRules, split_experts


def spell_out_patterns(quant_config: Any, config: Any, rules: TensorRules, mapper: Any) -> None:
    """Add the modules that each pattern of an ignore list matches, under vLLM's names.

    vLLM renames the plain entries of the list, and matches patterns with its own module names: a
    pattern that begins with the checkpoint's ``model.encoder`` would match nothing, and its modules
    would be read as quantised.

    Args:
        quant_config: vLLM's config of compressed-tensors; its ``ignore`` is extended. Others are
            left alone.
        config: transformers' configuration of the checkpoint.
        rules: Names of its tensors.
        mapper: The model's ``WeightsMapper``.
    """
    if quant_config is None or quant_config.get_name() != "compressed-tensors":
        return
    patterns = [entry[3:] for entry in quant_config.ignore if entry.startswith("re:")]
    if not patterns:
        return
    names = rules.linear_modules(split_experts(rules.shapes(config)))
    quant_config.ignore += [
        mapper.map_name(name)
        for name in names
        if any(re.match(pattern, one) for pattern in patterns for one in rules.all_names(name))
    ]
