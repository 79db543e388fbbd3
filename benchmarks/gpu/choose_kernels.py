"""How long a first self-check takes, and which of the kernels that are right ``vllm-diffusion tune`` chooses.

python benchmarks/gpu/choose_kernels.py --out tuned            # the 26B shape in FP8
vllm serve MODEL --additional-config '{"diffusion": {"tuned": "tuned/tuned.json"}}'
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from records import Rows, parser_of

from vllm_diffusion.cli.main import main as command
from vllm_diffusion.cli.tune import diffusion_config
from vllm_diffusion.kernel_choice.cases import Served
from vllm_diffusion.kernel_choice.on_ranks import gpu_name
from vllm_diffusion.kernel_choice.self_check import checked_choices
from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS
from vllm_diffusion.startup.machine import nvidia_lack

MODEL = Path(__file__).resolve().parents[1] / "configs" / "diffusion-gemma-26b-fp8"
# No weights are read of it, and no text.
OPTIONS = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "16384"]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--lengths", nargs="+", default=["4096"], help="as of `tune`")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder of the file")
    options = parser.parse_args()
    data = Rows(options.data)
    if (lack := nvidia_lack()) is not None:
        print(f"choose_kernels.py needs an NVIDIA GPU: {lack}.", file=sys.stderr)
        return 2
    config = diffusion_config(options.model, OPTIONS)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        checked = checked_choices(
            Served.of(config, DEFAULT_KERNELS),
            device="cuda:0",
            gpu=gpu_name(0),
            folder=Path(folder),
            forgets=True,
        )
    seconds = round(time.monotonic() - began, 1)
    replaced = str(checked) if checked != DEFAULT_KERNELS else ""
    data.add("self-check", seconds=seconds, replaced=replaced)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "tuned.json"
    words = ["tune", options.model, "--output", str(file), "--lengths", *options.lengths]
    if status := command([*words, *OPTIONS]):
        return status
    for kernel, ways in json.loads(file.read_text(encoding="utf-8"))["microseconds"].items():
        for way, microseconds in ways.items():
            data.add("tune", kernel=kernel, way=way, us=microseconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
