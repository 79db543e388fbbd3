"""The file of ``vllm-diffusion tune``, which replicas share so that all of them compute alike."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.kernel_choice.cases import Served
from vllm_diffusion.kernel_choice.on_ranks import gpu_name
from vllm_diffusion.kernel_choice.record import facts_of
from vllm_diffusion.startup.kernel_choices import KernelChoices, kernel_choices
from vllm_diffusion.startup.plugin_settings import OPTION, plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")

# A file with another number is not read.
_FORMAT = 1
_REMEDY = "measure with `vllm-diffusion tune` and this server's options, or leave tuned out"


@dataclass(frozen=True)
class TunedFor:
    """GPU, model and build that choices were measured for.

    Attributes:
        gpu: Name and compute capability of the GPU.
        served: Names and values of what decides which kernels run on which shapes.
        build: Versions, and the hash of the kernels' sources.
    """

    gpu: str
    served: Mapping[str, Any]
    build: Mapping[str, Any]

    @staticmethod
    def of(vllm_config: VllmConfig) -> TunedFor:
        """Describe this machine and a configuration; no CUDA context is created.

        Raises:
            ValueError: If there is no NVIDIA GPU; the end of a sentence.
        """
        from vllm import envs
        from vllm.platforms import current_platform

        if not current_platform.is_cuda():
            raise ValueError("is for NVIDIA GPUs, and this server has none")
        model = vllm_config.model_config
        shapes = Served.of(vllm_config, kernel_choices(vllm_config))
        served = {
            "model": model.architecture,
            "dtype": shapes.step.dtype,
            "canvas length": shapes.step.spec.length,
            "hidden size": shapes.step.hidden,
            "vocabulary": model.get_vocab_size(),
            "attention layers": [kind.name for kind in shapes.kinds],
            "window_anchor": shapes.anchor,
            "--tensor-parallel-size": vllm_config.parallel_config.tensor_parallel_size,
            "VLLM_BATCH_INVARIANT": bool(envs.VLLM_BATCH_INVARIANT),
        }
        facts = facts_of(gpu_name(0))
        # A driver is mended without its GPU's speed changing much, and on one machine before the next.
        build = {name: value for name, value in facts.items() if name not in ("gpu", "driver")}
        return TunedFor(facts["gpu"], served, build)


def tuned_json(tuned_for: TunedFor, kernels: KernelChoices, figures: Mapping[str, Any]) -> str:
    """Return the content of a file; the figures in it are for people."""
    content = {"format": _FORMAT, **asdict(tuned_for), "kernels": kernels.to_json()}
    return json.dumps(content | {"microseconds": figures}, indent=1) + "\n"


def read_tuned(path: Path) -> tuple[TunedFor, KernelChoices]:
    """Read the content that :func:`tuned_json` returned.

    Raises:
        ValueError: Saying why it cannot be read, as the end of a sentence; it names the field.
    """
    try:
        if path.exists() and not path.is_file():
            # Reading a pipe may never end.
            raise ValueError("is no file")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    except (UnicodeDecodeError, RecursionError):
        raise ValueError("is not JSON") from None
    fields = {"format": int, "gpu": str, "served": dict, "build": dict, "kernels": dict}
    for name, kind in fields.items():
        if not isinstance(content, dict) or type(content.get(name)) is not kind:
            raise ValueError(
                f"is not of `vllm-diffusion tune`: its field {name} is missing or wrong"
            )
    if content["format"] != _FORMAT:
        raise ValueError(f"has format {content['format']}, and this version reads {_FORMAT}")
    try:
        kernels = KernelChoices.from_json(content["kernels"])
    except ValueError as error:
        raise ValueError(f"has a wrong field kernels: {str(error).rstrip('.')}") from None
    return TunedFor(content["gpu"], content["served"], content["build"]), kernels


def apply_tuned(vllm_config: VllmConfig) -> None:
    """Put the choices of the operator's file where :func:`kernel_choices` finds them, and log them.

    Args:
        vllm_config: Configuration whose setting ``tuned`` names the file.

    Raises:
        ValueError: If the file cannot be read, or was measured on another kind of GPU, or for another
            model or options.
    """
    path = plugin_settings(vllm_config).tuned
    assert path is not None
    try:
        there, kernels = read_tuned(Path(path))
        here = TunedFor.of(vllm_config)
        if there.gpu != here.gpu:
            raise ValueError(f"was measured on {there.gpu}, and this server has {here.gpu}")
        if name := _difference(there.served, here.served):
            found = f"{name}: {there.served.get(name)}"
            raise ValueError(f"was measured for {found}, and this server has {here.served[name]}")
    except ValueError as error:
        raise ValueError(f"{OPTION}: tuned={path!r} {error}; {_REMEDY}.") from None
    if name := _difference(there.build, here.build):
        logger.warning(
            "tuned=%r is ignored: it was measured with %s %s, and here is %s. Replicas that take it "
            "compute otherwise; measure again with `vllm-diffusion tune`.",
            *(path, name, there.build.get(name), here.build[name]),
        )
        return
    vllm_config.model_config.tuned_kernels = kernels
    for line in _applied(vllm_config, kernels):
        logger.info("tuned=%r: %s.", path, line)


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the name of the first value that is another one here."""
    return next((name for name, value in here.items() if there.get(name) != value), None)


def _applied(vllm_config: VllmConfig, kernels: KernelChoices) -> Iterator[str]:
    """Yield a line for each setting that overrules the file, and for each choice that serves."""
    settings = plugin_settings(vllm_config)
    if settings.attention != "auto":
        yield f'the setting attention="{settings.attention}" wins over its choices of attention'
    if settings.skip_unlikely not in (None, kernels.skip_unlikely):
        yield f"the setting skip_unlikely={str(settings.skip_unlikely).lower()} wins over its choice"
    yield from kernel_choices(vllm_config).lines()
