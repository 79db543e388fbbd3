"""Diffusion models configured and made where vLLM believes that there is an H200.

``vllm serve`` configures in one process, and pickles the configuration for an engine in another, which
loads plugins and builds the model. On the CPU platform much of that answers otherwise than on CUDA's, so
both are tried with CUDA's, of which only the facts of a device are mocked: nothing is computed.

As a program (:func:`run`), it configures the checkpoints that it is given, as ``vllm serve`` does, makes
their models in a spawned process, and prints what both found as one line of JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

# Modules that no process on a GPU may import: vLLM's replace functions of torch in the whole process.
FOREIGN = (
    "vllm.v1.worker.cpu",
    "vllm.platforms.cpu",
    "vllm_diffusion.cpu.platform",
    "vllm_diffusion.cpu.triton_interpreter",
)


def pretend() -> None:
    """Make CUDA's platform the current one, before anything else of vLLM is imported."""
    # vLLM's compiled operators name functions of the driver, which are never called.
    sys.setdlopenflags(os.RTLD_LAZY)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class MockedCuda(NonNvmlCudaPlatform):
        """CUDA's platform, with the facts of an H200."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H200"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 * 1024**3

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    assert vllm.platforms._current_platform is None
    vllm.platforms._current_platform = MockedCuda()


def functions_of_torch() -> dict[str, Any]:
    """What vLLM's CPU worker replaces, and all that is beside it, by name."""
    import torch
    import vllm.utils.torch_utils
    import vllm.v1.worker.gpu.buffer_utils

    owners = (
        torch.cuda,
        torch.accelerator,
        torch.Tensor,
        torch.Event,
        vllm.utils.torch_utils,
        vllm.v1.worker.gpu.buffer_utils,
    )
    found = {
        f"{owner.__name__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if callable(value)
    }
    return found | {"torch.Event": torch.Event, "torch.Stream": torch.Stream}


def traces_of_the_cpu() -> dict[str, list[str]]:
    """What this process has that belongs to the CPU platform, by kind."""
    now = functions_of_torch()
    return {
        "modules": sorted(name for name in sys.modules if name.startswith(FOREIGN)),
        "functions": sorted(name for name, value in BEFORE.items() if now.get(name) is not value),
        "environment": [name for name in ("TRITON_INTERPRET",) if name in os.environ],
    }


def configure(arguments: list[str]) -> Any:
    """The configuration that ``vllm serve`` makes of its arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    engine_arguments = AsyncEngineArgs.from_cli_args(parsed)
    return engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)


def make_models(configurations: list[Any], answers: Any) -> None:
    """An engine's process: load plugins, and make the models of configurations that were sent.

    Args:
        configurations: Of ``vllm serve``.
        answers: A pipe, on which what each came to is sent.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    made = [_made(config) for config in configurations]
    answers.send({"models": made, "traces": traces_of_the_cpu()})
    answers.close()


def _made(config: Any) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    try:
        with (
            set_current_vllm_config(config, check_compile=False),
            set_default_torch_dtype(config.model_config.dtype),
        ):
            _one_rank()
            with torch.device("meta"):
                model = initialize_model(vllm_config=config)
    except Exception:
        return {"error": traceback.format_exc()}
    layers = config.compilation_config.static_forward_context.values()
    backends = {layer.attn_backend for layer in layers if hasattr(layer, "attn_backend")}
    return {
        "architecture": config.model_config.architecture,
        "model": type(model).__module__,
        "attention": sorted(f"{b.__module__}.{b.__qualname__}" for b in backends),
        "state": model.get_model_state_cls().__module__,
    }


def _one_rank() -> None:
    """Process groups of this process alone."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.utils.network_utils import get_open_port

    if model_parallel_is_initialized():
        return
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
    initialize_model_parallel(1, 1)


def main(runs: list[list[str]]) -> dict[str, Any]:
    """What both processes found.

    Args:
        runs: Arguments of ``vllm serve``, for each model.
    """
    from vllm.platforms import current_platform

    configurations = [configure(arguments) for arguments in runs]
    found: dict[str, Any] = {
        "platform": current_platform.device_type,
        "chosen": [config.attention_config.backend.name for config in configurations],
        "traces": traces_of_the_cpu(),
    }
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    engine = context.Process(target=make_models, args=(configurations, its))
    engine.start()
    its.close()
    try:
        found["engine"] = mine.recv()
    finally:
        engine.join()
    return found


def run(runs: list[list[str]], folder: Path) -> dict[str, Any]:
    """What :func:`main` returns, of a process of its own.

    Args:
        runs: Arguments of ``vllm serve``, for each model.
        folder: For a library that stands in for the driver's.
    """
    # Any library will do that is loaded already.
    loaded = Path("/proc/self/maps").read_text().splitlines()
    libc = next(line.split()[-1] for line in loaded if "libc.so" in line)
    (folder / "libcuda.so.1").symlink_to(libc)
    # The CPU platform of this process set it. vLLM takes no Triton without a driver, unless no device
    # is visible.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "LD_LIBRARY_PATH": str(folder),
        # A layer with shared experts makes a stream.
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": "1",
    }
    completed = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(runs)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


if __name__ in ("__main__", "__mp_main__"):
    # Before a spawned process reads the configuration, which asks for the platform.
    pretend()
    BEFORE = functions_of_torch()
if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
