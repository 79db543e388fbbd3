"""``vllm bench serve`` at batch size 1 for BF16, FP8 and NVFP4, with the limit that memory sets.

    python benchmarks/bench_formats.py
    python benchmarks/bench_formats.py --shape tiny --formats bf16 fp8-dynamic --prompts 2
    python benchmarks/bench_formats.py --mtp google/gemma-4-26B-A4B-it-assistant

Each format is served with random ("dummy") weights of the 26B shape, from the configs in
``benchmarks/configs/``: answers of given length, every canvas denoised for a given number of steps,
which random weights need since they never converge. Printed for each: generated tokens a second,
milliseconds a pass, the bytes that a pass must read (experts that were chosen, counted), the time
that memory needs for them at the measured rate of a copy, and the share of that limit reached.

In the same run, Gemma 4 of the same shape writes one token a pass; ``--mtp`` adds multi-token
prediction with that drafter. Random weights accept nothing, so the acceptance rate is an assumption
(``--mtp-acceptance``), which vLLM then imitates. ``--stock`` adds vLLM's own DiffusionGemma.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_file import DataFile
from memory_limit import pass_bytes
from timing import copy_rate, device_name

from vllm_diffusion.cli.checkpoint import shipped_checkpoint

CONFIGS = Path(__file__).with_name("configs")
TINY = shipped_checkpoint()
FORMATS = ("bf16", "fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")
START_SECONDS = 1800
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


@dataclass(frozen=True)
class Setting:
    """What is the same for every format."""

    shape: str
    num_prompts: int
    input_len: int
    output_len: int
    steps: int


@dataclass(frozen=True)
class Measured:
    """One server's run.

    Attributes:
        tokens_per_second: Generated tokens over the time that requests took.
        passes: Forward passes of all requests; for an autoregressive model, of its tokens.
        seconds: Duration of the run.
    """

    tokens_per_second: float
    passes: float
    seconds: float


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


def measure(folder: Path, setting: Setting, options: list[str], **variables: str) -> Measured:
    """Serve a folder, run ``vllm bench serve`` against it, and count its passes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder.with_suffix(".log")
    command = [*SERVE, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--load-format", "dummy", "--served-model-name", "model", "--max-num-seqs", "4"]
    command += ["--max-model-len", str(2 * (setting.input_len + setting.output_len))]
    command += ["--no-enable-prefix-caching", *options]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
            start_new_session=True,
        )
    try:
        wait_until_ready(server, url, log)
        run_client(folder, url, setting, num_prompts=1)
        before = counted_passes(url)
        result = run_client(folder, url, setting, num_prompts=setting.num_prompts)
        passes = counted_passes(url) - before
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)
    tokens = result["total_output_tokens"]
    # Autoregressive: a pass for each token, and the prefill.
    passes = passes or tokens + setting.num_prompts
    return Measured(tokens / result["duration"], passes, result["duration"])


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def run_client(folder: Path, url: str, setting: Setting, num_prompts: int) -> dict[str, Any]:
    result = folder / "result.json"
    command = [*SERVE, "bench", "serve", "--base-url", url, "--model", "model"]
    command += ["--tokenizer", str(folder), "--dataset-name", "random", "--ignore-eos"]
    command += ["--random-input-len", str(setting.input_len), "--max-concurrency", "1"]
    command += ["--random-output-len", str(setting.output_len), "--num-prompts", str(num_prompts)]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", result.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"vllm bench serve failed:\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        )
    return json.loads(result.read_text())


def counted_passes(url: str) -> float:
    """This package's counter; without it, vLLM's of denoise steps; 0 where there is neither."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    for name in ("vllm_diffusion:passes_total", "vllm:diffusion_num_denoising_steps_total"):
        values = [
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((name + "{", name + " "))
        ]
        if values:
            return sum(values)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
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
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    args = parser.parse_args()
    length = 64 if args.shape == "tiny" else 1024
    setting = Setting(
        args.shape, args.prompts, args.input_len or length, args.output_len or length, args.steps
    )
    run(args, setting)


def run(args: argparse.Namespace, setting: Setting) -> None:
    from transformers import DiffusionGemmaConfig

    rate = args.copy_rate * 1e9 if args.copy_rate else copy_rate()
    print(f"{device_name()}, copies {rate / 1e9:.1f} GB/s; {setting}", flush=True)
    data = DataFile(args.data)
    diffusion = {"max_denoising_steps": setting.steps, "confidence_threshold": 1e-30}
    ours = ["--additional-config", json.dumps({"diffusion": diffusion})]
    ours += ["--limit-mm-per-prompt", '{"image": 0, "video": 0}']
    with tempfile.TemporaryDirectory() as temporary:
        for one in args.formats:
            folder = write_checkpoint(Path(temporary) / one, setting.shape, one)
            settings = json.loads((folder / "config.json").read_text())
            quantization = settings.pop("quantization_config", None)
            config = DiffusionGemmaConfig.from_dict(settings)
            text = config.text_config
            touched = experts_touched(folder)
            context = setting.input_len + setting.output_len // 2 + config.canvas_length
            kv_bytes = 1 if (quantization or {}).get("kv_cache_scheme") else 2

            def report(
                label: str,
                measured: Measured,
                *,
                experts: float,
                denoises: bool = True,
                config: Any = config,
                quantization: Any = quantization,
                context: int = context,
                kv_bytes: int = kv_bytes,
            ) -> None:
                size = pass_bytes(
                    config,
                    quantization,
                    touched_experts=experts,
                    context=context,
                    kv_bytes=kv_bytes,
                    denoises=denoises,
                )
                print_row(label, measured, size.total, experts, rate, data)

            report(f"{one}, diffusion", measure(folder, setting, ours), experts=touched)
            if args.stock:
                options = [
                    *ours[2:],
                    "--diffusion-config",
                    json.dumps(
                        {
                            "max_denoising_steps": setting.steps,
                            "canvas_length": config.canvas_length,
                        }
                    ),
                ]
                stock = measure(folder, setting, options, VLLM_PLUGINS="vllm_diffusion_cpu")
                report(f"{one}, stock diffusion", stock, experts=touched)
            if args.no_autoregressive:
                continue
            single = write_checkpoint(Path(temporary) / f"{one}-ar", setting.shape, one, True)
            report(
                f"{one}, autoregressive",
                measure(single, setting, []),
                experts=text.top_k_experts,
                denoises=False,
            )
            if args.mtp:
                speculative = {
                    "model": args.mtp,
                    "num_speculative_tokens": args.mtp_tokens,
                    "rejection_sample_method": "synthetic",
                    "synthetic_acceptance_rate": args.mtp_acceptance,
                }
                options = ["--speculative-config", json.dumps(speculative)]
                measured = measure(single, setting, options)
                print(
                    f"{one}, multi-token prediction: {measured.tokens_per_second:.1f} tokens/s at "
                    f"an assumed acceptance of {args.mtp_acceptance}",
                    flush=True,
                )


def experts_touched(folder: Path) -> float:
    """Different experts that the rows of one canvas choose, mean over layers and steps."""
    script = Path(__file__).with_name("bench_routing.py")
    command = [sys.executable, str(script), str(folder), "--load-format", "dummy"]
    done = subprocess.run(
        [*command, "--canvases", "1", "--prompt-len", "20"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"counting experts failed:\n{done.stderr[-3000:]}")
    _, _, mean, *_ = done.stdout.strip().splitlines()[-1].split()
    return float(mean)


def print_row(
    label: str, measured: Measured, size: int, experts: float, rate: float, data: DataFile
) -> None:
    per_pass = measured.seconds / measured.passes
    limit = size / rate
    print(
        f"{label}: {measured.tokens_per_second:.1f} tokens/s, {1e3 * per_pass:.2f} ms a pass, reads "
        f"{size / 1e9:.3f} GB ({experts:.1f} experts a layer), which take {1e3 * limit:.2f} ms: "
        f"{limit / per_pass:.1%} of the limit",
        flush=True,
    )
    data.add(
        "formats",
        which=label,
        tokens_a_second=round(measured.tokens_per_second, 1),
        ms_a_pass=round(1e3 * per_pass, 3),
        gigabytes_a_pass=round(size / 1e9, 3),
        experts_a_layer=round(experts, 1),
        of_limit=round(limit / per_pass, 4),
    )


if __name__ == "__main__":
    main()
