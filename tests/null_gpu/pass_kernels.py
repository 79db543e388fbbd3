"""Kernels of a steady pass by name: six layers of the 26B shape in FP8, with a server's defaults.

    python -m tests.null_gpu.pass_kernels               # prints how often each part of the pass
    launches each kernel python -m tests.null_gpu.pass_kernels --canvases 8

A part is one of the graphs, or what is launched outside of them. ``test_engines.py`` compares the
table of one canvas with ``baselines.json``. How long a kernel takes, only a GPU says.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.null_gpu.engine_cases import PROMPT, drop, params_of, start_shape
from tests.support.null_gpu.build import missing
from tests.support.null_gpu.counts import read_counts, reset_counts
from tests.support.null_gpu.processes import ROOT, NullGpu

NUM_LAYERS = 6
# Graphs of few sizes; all else is a server's.
OPTIONS = {"max_num_seqs": 8}
OUTSIDE, LAYERS = "outside of graphs", "layers"
SECONDS = 1800


def write_six_layers(folder: Path, name: str) -> Path:
    """Write a config of the 26B shape's first six layers: five with a window, and one without.

    Args:
        folder: Does not exist yet.
        name: Format of the weights, as ``benchmarks/bench_formats.py`` has it.
    """
    from bench_formats import quantization_of, write_checkpoint

    model = write_checkpoint(folder, "26b", name)
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_hidden_layers": NUM_LAYERS, "layer_types": text["layer_types"][:NUM_LAYERS]}
    if quantization := quantization_of(name, NUM_LAYERS):
        config["quantization_config"] = quantization
    (model / "config.json").write_text(json.dumps(config))
    return model


def count_kernels(model: str, num_canvases: int) -> dict[str, int]:
    """Count the launches of a steady pass; a name is the part and the kernel.

    Args:
        model: Folder of the checkpoint.
        num_canvases: Requests of the pass.
    """
    llm = start_shape(model, OPTIONS)
    engine = llm.llm_engine
    ids = [f"steady {i}" for i in range(num_canvases)]
    for request_id in ids:
        params = params_of("plain", max_tokens=300)
        engine.add_request(request_id, {"prompt_token_ids": PROMPT}, params)
    for _ in range(6):
        engine.step()
    launches = launches_by_part(engine.step)
    drop(engine, ids)
    return {f"{part}: {kernel}": launches[part, kernel] for part, kernel in sorted(launches)}


def launches_by_part(call: Callable[[], object]) -> Counter[tuple[str, str]]:
    """Count the launches of ``call`` by part of a pass and by kernel."""
    import torch

    from vllm_diffusion.startup.cuda_graphs import GraphedFunction

    found: Counter[tuple[str, str]] = Counter()
    function = LAYERS
    stock_replay, stock_call = torch.cuda.CUDAGraph.replay, GraphedFunction.__call__

    def take(part: str) -> None:
        for what, number in read_counts().items():
            kind, _, name = what.removeprefix("in a graph: ").partition(" ")
            if kind == "kernel":
                found[part, short(name)] += number
        reset_counts()

    def replay(self: Any) -> None:
        take(OUTSIDE)
        stock_replay(self)
        take(function)

    def graphed(self: Any, *inputs: Any, **others: Any) -> Any:
        nonlocal function
        function = self._function.__name__.lstrip("_")
        try:
            return stock_call(self, *inputs, **others)
        finally:
            function = LAYERS

    reset_counts()
    with (
        patch.object(torch.cuda.CUDAGraph, "replay", replay),
        patch.object(GraphedFunction, "__call__", graphed),
    ):
        call()
    take(OUTSIDE)
    return found


def short(name: str) -> str:
    """Shorten a C++ name with all template arguments to the function and what it applies."""
    if name.startswith("cublas"):
        return name
    named = re.sub(r"\(anonymous namespace\)::", "", name)
    function = re.split("[<(]", named)[0].rpartition(" ")[2].rpartition("::")[2]
    applied = re.findall(
        r"\b(?!gpu_)\w+(?:Functor\w*|Ops|_kernel_cuda|_kernel_impl|_cuda)\b", named
    )
    # A binary operation is the argument of another that defines its call.
    applied = [word for word in applied if not re.match("(Binary|AUnary|BUnary)Functor", word)]
    return f"{function} of {applied[0]}" if applied else function


def trace(gpu: NullGpu, folder: Path, num_canvases: int) -> dict[str, int]:
    """Return the counts of :func:`count_kernels` for six layers in FP8.

    Args:
        gpu: A process that has imported vLLM.
        folder: For the checkpoint; does not exist yet.
        num_canvases: Requests of the pass.
    """
    model = write_six_layers(folder, "fp8-dynamic")
    case = "tests.null_gpu.pass_kernels:count_kernels"
    arguments = {"model": str(model), "num_canvases": num_canvases}
    return gpu.run(case, seconds=SECONDS, **arguments).checked()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--canvases", type=int, default=1, help="requests of the pass")
    arguments = parser.parse_args()
    lacks = missing()
    if lacks is not None:
        print(lacks, file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT / "benchmarks"))
    with (
        tempfile.TemporaryDirectory() as folder,
        NullGpu(Path(folder), imports="vllm") as gpu,
    ):
        launches = trace(gpu, Path(folder) / "model", arguments.canvases)
    parts = Counter()
    for name, number in launches.items():
        print(f"{number:6}  {name}")
        parts[name.partition(": ")[0]] += number
    for part, number in parts.items():
        print(f"{number:6}  {part}, in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
