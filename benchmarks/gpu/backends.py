"""An engine in this process with the back ends of products that are asked for, and the tiles of
Triton's experts.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
# The engine runs in this process, where its layers can be called and its kernels be seen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import results
import torch
import tune_experts
from serving import prepare

ON_GPU = torch.cuda.is_available()
MODEL = Path(__file__).resolve().parents[1] / "configs" / "diffusion-gemma-26b-fp8"
if not ON_GPU:
    MODEL = Path(__file__).resolve().parents[2] / "vllm_diffusion/checkpoints/tiny_diffusion_gemma"
EXPERTS = tune_experts.Experts(num_experts=128, width=704, hidden_size=2816, top_k=8, dtype="fp8")
# In vLLM's wheel, of these experts.
H100_TILES = "E=128,N=704,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose back ends."""
    parser.add_argument("--moe", default="auto", help="vLLM's --moe-backend")
    parser.add_argument("--linear", default="auto", help="vLLM's --linear-backend")
    parser.add_argument("--humming-input", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument(
        "--tiles", choices=("wheel-h100", "tuned"), help="of Triton's experts; vLLM's own if unset"
    )


def named(options: argparse.Namespace) -> dict[str, str]:
    """Columns of a row that name the back ends."""
    moe = f"{options.moe}, {options.tiles} tiles" if options.tiles else options.moe
    fp8 = options.humming_input == "fp8" and "humming" in (options.moe, options.linear)
    return {"moe": moe, "linear": options.linear, "activations": "fp8" if fp8 else "default"}


def write_tiles(which: str, folder: Path) -> Path:
    """Write a file of Triton's tiles under this card's name.

    Args:
        which: ``"wheel-h100"`` for those that vLLM's wheel has of an H100, ``"tuned"`` for those
            that the newest kept result of ``tune_experts.py`` found.
        folder: For ``VLLM_TUNED_CONFIG_FOLDER``.

    Raises:
        ValueError: If there are none.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe

    if which == "tuned":
        kept = results.read_all(sorted(path for path in results.RESULTS.iterdir() if path.is_dir()))
        runs = [run for run in kept if "experts" in run.found]
        if not runs:
            raise ValueError("no result of the experiment `experts` is kept; run it first.")
        rows = max(runs, key=lambda run: run.started).found["experts"].rows
        configs = {row["rows"]: row["config"] for row in rows if row["dtype"] == EXPERTS.dtype}
        return tune_experts.write(folder, EXPERTS, configs)
    source = Path(fused_moe.__file__).parent / "configs" / H100_TILES
    if not source.is_file():
        raise ValueError(f"vLLM has no {source.name}.")
    name = fused_moe.get_config_file_name(EXPERTS.num_experts, EXPERTS.width, EXPERTS.dtype_name)
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, folder / name))


def start(options: argparse.Namespace, steps: int, layers: int | None = None, **engine: Any) -> Any:
    """Start an engine of the 26B shape with random weights; on a CPU of the shipped checkpoint.

    Args:
        options: Of the command, see :func:`add_options`.
        steps: Denoising steps of a canvas.
        layers: Number of layers, the first ones; all if left out.
        engine: Further options of ``LLM``.
    """
    from vllm import LLM

    scratch = Path(tempfile.mkdtemp())
    folder = scratch / "model"
    prepare(MODEL, folder, steps)
    if layers is not None and ON_GPU:
        config = json.loads((folder / "config.json").read_text())
        text = config["text_config"]
        text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
        (folder / "config.json").write_text(json.dumps(config))
    if options.humming_input == "fp8":
        os.environ["VLLM_HUMMING_INPUT_QUANT_CONFIG"] = '{"dtype": "float8e4m3"}'
    if options.tiles is not None:
        path = write_tiles(options.tiles, scratch / "tiles")
        os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(path.parent)
    return LLM(
        str(folder),
        load_format="dummy" if ON_GPU else "auto",
        language_model_only=True,
        moe_backend=options.moe,
        linear_backend=options.linear,
        **engine,
    )


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
