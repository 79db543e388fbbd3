"""``vllm bench serve`` at batch size 1 for BF16, FP8 and NVFP4, with the limit that memory sets.

    python benchmarks/bench_formats.py
    python benchmarks/bench_formats.py --shape tiny --formats bf16 fp8-dynamic --prompts 2
    python benchmarks/bench_formats.py --mtp google/gemma-4-26B-A4B-it-assistant

Each format is served with random ("dummy") weights of the 26B shape, from the configs in
``benchmarks/configs/``: answers of given length, every canvas denoised for a given number of steps,
which random weights need since they never converge. A row has: generated tokens a second,
milliseconds a pass, the bytes that a pass must read (experts that were chosen, counted), the time
that memory needs for them at the measured rate of a copy, and the share of that limit reached.

In the same run, Gemma 4 of the same shape writes one token a pass; ``--mtp`` adds multi-token
prediction with that drafter. Random weights accept nothing, so the acceptance rate is an assumption
(``--mtp-acceptance``), which vLLM then imitates. ``--stock`` adds vLLM's own DiffusionGemma.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memory_limit import pass_bytes
from records import Rows, parser_of, read
from serving import Side, Sweep, fix_steps, passes_of
from timing import STOCK, copy_rate, place

from vllm_diffusion.checkpoints import shipped_checkpoint

CONFIGS = Path(__file__).with_name("configs")
TINY = shipped_checkpoint()
FORMATS = ("bf16", "fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")


def write_checkpoint(folder: Path, shape: str, name: str, autoregressive: bool = False) -> Path:
    """A folder that ``--load-format dummy`` serves: a config of the layout, and a tokenizer."""
    folder.mkdir(parents=True)
    for path in TINY.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads(
        (TINY / "config.json" if shape == "tiny" else CONFIGS / "26b.json").read_text()
    )
    quantization = quantization_of(name, config["text_config"]["num_hidden_layers"])
    if quantization is not None:
        config["quantization_config"] = quantization
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    if autoregressive:
        config = autoregressive_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def quantization_of(name: str, num_layers: int) -> dict[str, Any] | None:
    """A format's config, with entries for the routers of layers that there are."""
    if name == "bf16":
        return None
    settings = json.loads((CONFIGS / f"{name}.json").read_text())
    absent = tuple(f".layers.{layer}." for layer in range(num_layers, 100))
    settings["ignore"] = [e for e in settings["ignore"] if not any(a in e for a in absent)]
    return settings


def autoregressive_config(config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 4 with the same text layers."""
    text = {**config["text_config"], "model_type": "gemma4_text", "enable_moe_block": True}
    text |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_kv_shared_layers": 0}
    text |= {"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": None}
    quantization = config.get("quantization_config")
    if quantization is not None:
        kept = [e for e in quantization["ignore"] if not e.startswith("model.encoder")]
        if quantization["quant_method"] == "compressed-tensors":
            kept.append("re:.*router.*")
        text["quantization_config"] = {**quantization, "ignore": kept}
    return text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=("26b", "tiny"), default="26b")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--input-len", type=int, help="tokens; 1024, and 64 for the tiny shape")
    parser.add_argument("--output-len", type=int, help="the same")
    parser.add_argument("--steps", type=int, default=16, help="denoise steps of each canvas")
    parser.add_argument("--copy-rate", type=float, help="GB/s, instead of measuring it")
    parser.add_argument("--no-autoregressive", action="store_true")
    parser.add_argument("--stock", action="store_true", help="also vLLM's own DiffusionGemma")
    parser.add_argument("--mtp", help="folder or name of Gemma 4's drafter")
    parser.add_argument("--mtp-tokens", type=int, default=4)
    parser.add_argument("--mtp-acceptance", type=float, default=0.7)
    args = parser.parse_args()
    length = 64 if args.shape == "tiny" else 1024
    args.input_len, args.output_len = args.input_len or length, args.output_len or length
    rate = args.copy_rate * 1e9 if args.copy_rate else copy_rate()
    print(f"{place()}, copies {rate / 1e9:.1f} GB/s", flush=True)
    data = Rows(args.data)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for one in args.formats:
                for row in measure(one, Path(folder) / one, args, rate):
                    data.add("formats", **row)
        except ValueError as error:
            sys.exit(str(error))


def measure(
    name: str, folder: Path, args: argparse.Namespace, rate: float
) -> Iterator[dict[str, Any]]:
    """A format's rows.

    Args:
        name: The format.
        folder: For what is served, made.
        args: Of the command.
        rate: Bytes a second that memory copies.
    """
    from transformers import DiffusionGemmaConfig

    made = write_checkpoint(folder / "canvases", args.shape, name)
    fix_steps(made, args.steps)
    settings = json.loads((made / "config.json").read_text())
    quantization = settings.pop("quantization_config", None)
    config = DiffusionGemmaConfig.from_dict(settings)
    run = (args.input_len, 1)
    sweep = Sweep(folder, [run], args.output_len, args.prompts)
    words = ["--max-num-seqs", "4", "--no-enable-prefix-caching"]
    words += ["--max-model-len", str(2 * (args.input_len + args.output_len))]

    def row(
        side: str, made: Path, experts: float, *options: str, **variables: str
    ) -> dict[str, Any]:
        ((_, _, found),) = sweep.of([Side(side, made, [*words, *options], variables)])
        denoises = "diffusion" in side
        size = pass_bytes(
            config,
            quantization,
            touched_experts=experts,
            context=args.input_len + args.output_len // 2 + config.canvas_length,
            kv_bytes=1 if (quantization or {}).get("kv_cache_scheme") else 2,
            denoises=denoises,
        ).total
        # What comes as one chunk comes after the passes of a canvas, or of a token.
        passes = passes_of(sweep.said(side), args.steps) if denoises else 1
        per_pass = found["median_itl_ms"] / passes
        return {
            "which": f"{name}, {side}",
            "tokens_a_second": round(found["output_throughput"], 1),
            "ms_a_pass": round(per_pass, 3),
            "gigabytes_a_pass": round(size / 1e9, 3),
            "experts_a_layer": round(experts, 1),
            "of_limit": round(1e3 * size / rate / per_pass, 4),
        }

    touched = experts_touched(made)
    yield row("diffusion", made, touched)
    if args.stock:
        yield row("stock diffusion", made, touched, **STOCK)
    if args.no_autoregressive:
        return
    single = write_checkpoint(folder / "single", args.shape, name, autoregressive=True)
    top_k = config.text_config.top_k_experts
    yield row("autoregressive", single, top_k)
    if args.mtp:
        speculative = {
            "model": args.mtp,
            "num_speculative_tokens": args.mtp_tokens,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rate": args.mtp_acceptance,
        }
        side = f"multi-token prediction, assumed acceptance {args.mtp_acceptance}"
        found = row(side, single, top_k, "--speculative-config", json.dumps(speculative))
        # Its passes are those of target and drafter.
        unknown = dict.fromkeys(("ms_a_pass", "gigabytes_a_pass", "experts_a_layer", "of_limit"))
        yield found | unknown


def experts_touched(folder: Path) -> float:
    """Different experts that the rows of one canvas choose, mean over layers and steps."""
    script = Path(__file__).with_name("bench_routing.py")
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, str(script), str(folder), "--load-format", "dummy"]
        command += ["--canvases", "1", "--prompt-len", "20", "--data", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(f"counting experts failed:\n{done.stderr[-3000:]}")
        (row,) = read(Path(file.name))
    return float(row["touched"])


if __name__ == "__main__":
    main()
