"""A folder to benchmark: a checkpoint, or a config alone, whose canvases take a fixed number of steps.

    python benchmarks/serve_folder.py SOURCE TARGET --steps 16

Weights are linked. A source without a tokenizer gets one of as many invented words as the model has
tokens, so that prompts of a given length can be written and answers be read.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any


def fix_steps(generation: dict[str, Any], steps: int) -> dict[str, Any]:
    """Settings under which no canvas converges before the cap, here as in stock vLLM."""
    # A canvas is stable once it equals those of this many steps before it, and there are fewer.
    return generation | {"max_denoising_steps": steps, "stability_threshold": steps}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word a token, ``w3 w4 ...``: a text of n words has n tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Not the beginning of any word: a special token is found inside of words too.
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    names = [*special.values(), *(f"w{i}" for i in range(len(special), vocab_size))]
    words = models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def prepare(source: Path, target: Path, steps: int) -> None:
    """Fill ``target``; what is there is replaced.

    Raises:
        ValueError: If ``source`` lacks what every checkpoint has.
    """
    for name in ("config.json", "generation_config.json"):
        if not (source / name).is_file():
            raise ValueError(
                f"{source} has no {name}; name a folder with a checkpoint or a config."
            )
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, target)
        elif path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
    generation = target / "generation_config.json"
    generation.write_text(json.dumps(fix_steps(json.loads(generation.read_text()), steps)))
    if not (target / "tokenizer.json").is_file():
        config = json.loads((target / "config.json").read_text())
        write_tokenizer(target, config.get("text_config", config)["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of every canvas")
    args = parser.parse_args()
    try:
        prepare(args.source, args.target, args.steps)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
