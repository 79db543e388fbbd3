"""A server that cannot serve what it was asked to says so in one sentence, before it loads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from tests.support.checkpoints import copy_checkpoint
from tests.support.torch_offloading import CONNECTOR
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

NUMBER_KEYS = (
    "max_denoising_steps",
    "t_min",
    "t_max",
    "confidence_threshold",
    "stability_threshold",
)
# Of google/diffusiongemma-26B-A4B-it.
PUBLISHED = {
    "max_denoising_steps": 48,
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}
INTEGER_KEYS = ("max_denoising_steps", "stability_threshold")


def configure(checkpoint: Path, **options: Any) -> Any:
    """What ``vllm serve`` resolves before it loads anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True}
    return EngineArgs(model=str(checkpoint), **(defaults | options)).create_engine_config()


def refusal(checkpoint: Path, **options: Any) -> str:
    """The message with which the configuration is refused: one sentence, or two."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        configure(checkpoint, **options)
    error = raised.value
    message = str(error)
    if isinstance(error, pydantic.ValidationError):
        (only,) = error.errors()
        message = only["msg"].removeprefix("Value error, ")
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_shipped_checkpoint(tmp_path: Path) -> None:
    """What the bad cases below change is good before the change."""
    config = configure(copy_checkpoint(tmp_path))
    assert config.diffusion_config.canvas_length < 256
    assert config.scheduler_config.scheduler_cls.startswith("vllm_diffusion.")


@pytest.mark.parametrize("is_in_vllm", [True, False])
def test_class_of_the_same_name(
    is_in_vllm: bool,
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where vLLM brings a class of the same architecture, a line says which runs."""
    from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaEngineConfig

    checkpoint = copy_checkpoint(tmp_path)
    configure(checkpoint)
    if not is_in_vllm:
        start_log.clear()
        monkeypatch.setattr(DiffusionGemmaEngineConfig, "is_in_vllm", False)
        configure(checkpoint)
    lines = [line for line in start_log.messages if "VLLM_DIFFUSION_DISABLE=1" in line]
    assert len(lines) == is_in_vllm
    assert all(
        "DiffusionGemmaForBlockDiffusion: vllm-diffusion's class runs" in line for line in lines
    )


def test_logits_processors(tmp_path: Path) -> None:
    """They take whole rows of logits, which the sampler never has."""
    message = refusal(copy_checkpoint(tmp_path), logits_processors=["a.b:Processor"])
    assert message.startswith("--logits-processors: a.b:Processor")


@pytest.mark.parametrize("key", NUMBER_KEYS)
def test_generation_config_without_key(
    key: str, tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A missing key has the published value, and a line says so."""
    config = configure(copy_checkpoint(tmp_path, generation_config={key: None}))
    spec = config.model_config.canvas_spec
    values = {"max_denoising_steps": spec.max_denoising_steps, **spec.settings}
    assert values[key] == PUBLISHED[key]
    (line,) = [line for line in start_log.messages if "published values" in line]
    assert f"generation_config.json has no {key} ({PUBLISHED[key]}):" in line


def test_published_values() -> None:
    """They are those of transformers, for a file without them."""
    from transformers import DiffusionGemmaGenerationConfig

    stock = DiffusionGemmaGenerationConfig._get_default_generation_params()
    stock["entropy_bound"] = stock["sampler_config"].entropy_bound
    assert PUBLISHED.items() <= stock.items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in NUMBER_KEYS for value in ("0.5", True, [1], float("nan"), -1)),
        *((key, 1.5) for key in INTEGER_KEYS),
        ("max_denoising_steps", 0),
        ("t_min", 0.0),
        ("t_max", float("inf")),
        ("confidence_threshold", 0),
    ],
    ids=str,
)
def test_generation_config_malformed_key(key: str, value: Any, tmp_path: Path) -> None:
    """A key of the wrong type or range is named with its value and what is allowed."""
    message = refusal(copy_checkpoint(tmp_path, generation_config={key: value}))
    assert "generation_config.json" in message
    assert f"{key}={value!r} must be" in message


def test_generation_config_falling_temperature(tmp_path: Path) -> None:
    """t_max below t_min is a contradiction that names both."""
    message = refusal(copy_checkpoint(tmp_path, generation_config={"t_min": 0.9, "t_max": 0.8}))
    assert "t_max=0.8 is below t_min=0.9" in message


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ("EntropyBoundSamplerConfig", ["sampler_config='EntropyBound", "an object"]),
        ([0.1], ["sampler_config=[0.1]", "an object"]),
        (
            {"_cls_name": "NoSuchSampler", "entropy_bound": 0.1},
            ["NoSuchSampler", "only EntropyBoundSamplerConfig"],
        ),
        *(
            ({"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": value}, [str(value)])
            for value in ("0.1", -0.1, 0, float("nan"), True)
        ),
    ],
    ids=str,
)
def test_generation_config_sampler(sampler: Any, words: list[str], tmp_path: Path) -> None:
    """An unknown sampler class, or a setting of the wrong type, is named."""
    message = refusal(copy_checkpoint(tmp_path, generation_config={"sampler_config": sampler}))
    for word in [*words, "sampler_config", "generation_config.json"]:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param('{"t_min": 0.4,', ["not valid JSON"], id="broken JSON"),
        pytest.param("[1, 2]", ["must hold a JSON object"], id="a list"),
        pytest.param("", ["not valid JSON"], id="empty"),
    ],
)
def test_generation_config_file(content: str, words: list[str], tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    (copy_checkpoint(tmp_path) / "generation_config.json").write_text(content)
    message = refusal(tmp_path)
    for word in [*words, "generation_config.json"]:
        assert word in message


@pytest.mark.parametrize("sampler", [None, {"_cls_name": "EntropyBoundSamplerConfig"}, {}], ids=str)
def test_generation_config_sampler_without_its_setting(sampler: Any, tmp_path: Path) -> None:
    config = configure(copy_checkpoint(tmp_path, generation_config={"sampler_config": sampler}))
    assert config.model_config.canvas_spec.settings["entropy_bound"] == PUBLISHED["entropy_bound"]


def test_no_generation_config(tmp_path: Path, start_log: pytest.LogCaptureFixture) -> None:
    """A checkpoint without the file is served as published; all that is missing is in one line."""
    (copy_checkpoint(tmp_path) / "generation_config.json").unlink()
    spec = configure(tmp_path).model_config.canvas_spec
    assert {"max_denoising_steps": spec.max_denoising_steps, **spec.settings} == PUBLISHED
    (line,) = [line for line in start_log.messages if "published values" in line]
    assert all(key in line for key in PUBLISHED)


def test_all_missing_fields_at_once() -> None:
    """A family without published values names every field that a file lacks."""
    from vllm_diffusion.startup.denoising_settings import Published

    published = Published({"t_min": 0.4}, "file.json", keys={"t_max": "schedule.t_max"})
    published.check_present(["t_min"])
    with pytest.raises(ValueError, match="has no schedule.t_max, steps, which") as raised:
        published.check_present(["t_min", "t_max", "steps"])
    assert """'{"diffusion": {"t_max": ..., "steps": ...}}'""" in str(raised.value)


def test_start_up_options_stand_for_missing_keys(tmp_path: Path) -> None:
    """The operator's settings come before what is published."""
    settings = {
        "max_denoising_steps": 4,
        "t_min": 0.4,
        "t_max": 0.8,
        "entropy_bound": 0.1,
        "confidence_threshold": 0.005,
        "stability_threshold": 1,
    }
    (copy_checkpoint(tmp_path) / "generation_config.json").unlink()
    spec = configure(tmp_path, additional_config={"diffusion": settings}).model_config.canvas_spec
    assert spec.max_denoising_steps == 4


@pytest.mark.parametrize("value", [None, "absent", 0, -1], ids=str)
def test_canvas_length(value: Any, tmp_path: Path) -> None:
    """A canvas length that is absent or is none is refused by name."""
    path = copy_checkpoint(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    config["canvas_length"] = value
    if value == "absent":
        del config["canvas_length"]
    path.write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert "canvas_length" in message
    assert "config.json" in message


@pytest.mark.parametrize("value", [1.5, "32", True], ids=repr)
def test_canvas_length_of_the_wrong_type(value: Any, tmp_path: Path) -> None:
    """transformers, which reads the file first, refuses these by the same name."""
    checkpoint = copy_checkpoint(tmp_path, config={"canvas_length": value})
    with pytest.raises(Exception, match=f"canvas_length.*{value!r}"):
        configure(checkpoint)


@pytest.mark.parametrize("canvas_length", [128, 256])
def test_canvas_longer_than_the_model_length(canvas_length: int, tmp_path: Path) -> None:
    """A canvas that leaves no room for a prompt is refused with the option to change."""
    checkpoint = copy_checkpoint(tmp_path, config={"canvas_length": canvas_length})
    message = refusal(checkpoint, max_model_len=128)
    assert f"canvas_length={canvas_length}" in message
    assert "--max-model-len" in message


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"canvas_length": 0}, "canvas_length"),
        ({"canvas_length": "wide"}, "canvas_length"),
        ({"max_denoising_steps": 0}, "max_denoising_steps"),
        ({"canvas": 32}, "canvas"),
    ],
    ids=str,
)
def test_diffusion_config_option(config: dict[str, Any], word: str, tmp_path: Path) -> None:
    """vLLM's own --diffusion-config is checked too, by it or by us."""
    with pytest.raises((ValueError, TypeError), match=word):
        configure(copy_checkpoint(tmp_path), diffusion_config={"canvas_length": 32, **config})


def test_budget_below_two_canvases(tmp_path: Path) -> None:
    """A token budget in which canvases starve is refused with the least that will do."""
    checkpoint = copy_checkpoint(tmp_path, config={"canvas_length": 32})
    text_only = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    message = refusal(checkpoint, max_num_batched_tokens=63, max_num_seqs=1, **text_only)
    assert "max_num_batched_tokens=63" in message
    assert "--max-num-batched-tokens" in message
    assert "64" in message
    configure(checkpoint, max_num_batched_tokens=64, max_num_seqs=1, **text_only)


@pytest.mark.parametrize(
    ("options", "unheld"),
    [
        ({"max_num_seqs": 1, "max_model_len": 1024}, ["video"]),
        # Two canvases, which is enough without images and videos.
        ({"max_num_seqs": 1, "max_num_batched_tokens": 64}, ["image", "video"]),
    ],
    ids=str,
)
def test_budget_below_a_video(
    options: dict[str, Any], unheld: list[str], tmp_path: Path, start_log: pytest.LogCaptureFixture
) -> None:
    """A pass that cannot hold a video serves the rest, and says so; who asks for one is refused."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    def offered(**more: Any) -> list[str]:
        """What a request may bring."""
        model_config = configure(checkpoint, **options | more).model_config
        limits = MULTIMODAL_REGISTRY.create_processor(model_config).info.allowed_mm_limits
        return [kind for kind, most in limits.items() if most > 0]

    checkpoint = copy_checkpoint(tmp_path)
    assert offered() == [kind for kind in ("image", "video") if kind not in unheld]
    (line,) = (line for line in start_log.messages if "requests with one are refused" in line)
    assert all(kind in line for kind in unheld)
    (least,) = re.findall(r"--max-num-batched-tokens of at least (\d+)", line)
    start_log.clear()
    assert offered(max_num_batched_tokens=int(least)) == ["image", "video"]
    assert not any("are refused" in line for line in start_log.messages)
    assert "video" not in offered(max_num_batched_tokens=int(least) - 1)

    message = refusal(checkpoint, **options, limit_mm_per_prompt={"video": 1})
    assert f"set --max-num-batched-tokens to at least {least}" in message
    assert ("(unset" in message) == ("max_num_batched_tokens" not in options)
    (limits,) = re.findall(r"--limit-mm-per-prompt '(.*)'", message)
    assert "video" not in offered(limit_mm_per_prompt=json.loads(limits))


@pytest.mark.parametrize(
    ("key", "value"),
    [("sliding_window", -4), ("hidden_size", -4), ("hidden_size", 0), ("vocab_size", -1)],
)
def test_number_of_the_checkpoint(key: str, value: int, tmp_path: Path) -> None:
    """Refused before anything is made of it, also where no weights are read."""
    checkpoint = copy_checkpoint(tmp_path, text_config={key: value})
    for options in ({}, {"load_format": "dummy"}):
        assert f"text_config.{key}={value} in config.json" in refusal(checkpoint, **options)


def test_unsupported_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another vLLM is refused with what to install."""
    from vllm_diffusion.hooks import upstream

    monkeypatch.setattr(upstream, "installed_version", lambda: "0.34.0")
    message = refusal(copy_checkpoint(tmp_path))
    assert "0.34.0" in message
    assert upstream.INSTALL in message


@pytest.mark.parametrize("backend", ["lm-format-enforcer", "outlines"])
def test_constraint_back_ends_that_cannot_serve(backend: str, tmp_path: Path) -> None:
    """They would end the engine at the first request with a constraint, or hold a canvas wrongly."""
    options = {"structured_outputs_config": {"backend": backend}}
    message = refusal(copy_checkpoint(tmp_path), **options)
    assert f'backend="{backend}" is not supported' in message
    assert '"xgrammar" or "guidance"' in message


@pytest.mark.parametrize("backend", ["FLASHINFER", "FLEX_ATTENTION", "CPU_ATTN", "FLASH_ATTN"])
def test_attention_backend_by_name(backend: str, tmp_path: Path) -> None:
    """A back end that cannot serve the model here is refused by its name, with those that can."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() and backend == "FLASH_ATTN":
        pytest.skip("this machine has an accelerator, which has FLASH_ATTN")
    message = refusal(copy_checkpoint(tmp_path), attention_backend=backend)
    assert f"--attention-backend {backend}" in message
    assert "leave it unset" in message


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"entropy_bond": 0.1}, "entropy_bond"),
        ({"max_denoising_steps": 0}, "max_denoising_steps=0"),
        ({"max_denoising_steps": "8"}, "max_denoising_steps='8'"),
        ({"max_denoising_steps": 2.5}, "max_denoising_steps=2.5"),
        ({"t_max": float("nan")}, "t_max=nan"),
        ({"t_min": 0.9, "t_max": 0.5}, "t_max=0.5"),
        ({"window_anchor": "row"}, "window_anchor='row'"),
        ({"window_anchor": 3}, "window_anchor=3"),
        ({"self_check": "sometimes"}, "self_check='sometimes'"),
        ({"self_check": True}, "self_check=True"),
        ("fast", "'fast'"),
        ([1], "[1]"),
    ],
    ids=str,
)
def test_additional_config(settings: Any, word: str, tmp_path: Path) -> None:
    """A start-up setting that is unknown or badly typed is named with its value."""
    message = refusal(copy_checkpoint(tmp_path), additional_config={"diffusion": settings})
    assert word in message


def test_checkpoint_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint larger than the free memory is refused before it is read."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this machine has an accelerator, whose memory vLLM measures")
    monkeypatch.setattr(
        "psutil.virtual_memory", lambda: SimpleNamespace(available=1024**2, total=1)
    )
    message = refusal(copy_checkpoint(tmp_path))
    assert str(tmp_path) in message
    assert "memory" in message
    # Weights that are made up take what the model takes, which vLLM measures.
    configure(tmp_path, load_format="dummy")


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def _name_missing_shard(path: Path) -> None:
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"a": path.name, "b": "model-2.safetensors"}}))


@pytest.mark.parametrize("name", ["model-2.safetensors", "generation_config.json"])
def test_named_pipe(name: str, tmp_path: Path) -> None:
    """In a checkpoint's folder it is named, and not read for ever."""
    folder = copy_checkpoint(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = refusal(folder)
    assert f"{folder} holds {name}, which is a named pipe and not a regular file" in message
    assert "again" in message


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        pytest.param(lambda path: _truncate(path, 100_000), "truncated", id="truncated"),
        pytest.param(lambda path: _truncate(path, 100), "truncated", id="truncated in its header"),
        pytest.param(lambda path: _truncate(path, 0), "truncated", id="empty"),
        pytest.param(lambda path: _overwrite(path, 8, b"{{{{"), "truncated", id="damaged header"),
        pytest.param(lambda path: _overwrite(path, 0, b"\xff" * 8), "truncated", id="no header"),
        pytest.param(_name_missing_shard, "model-2.safetensors", id="missing shard"),
    ],
)
def test_damaged_weights(damage: Callable[[Path], None], word: str, tmp_path: Path) -> None:
    """A damaged file is named before the engine starts."""
    path = copy_checkpoint(tmp_path) / "model.safetensors"
    damage(path)
    message = refusal(tmp_path)
    assert "model.safetensors" in message
    assert word in message
    assert "again" in message
    configure(tmp_path, load_format="dummy")


def test_target_device_set(tmp_path: Path) -> None:
    """VLLM_TARGET_DEVICE=cpu, which switches platform plugins off, is named with what to do."""
    program = (
        # What collections would walk is the million objects of the import.
        "import atexit, gc\ngc.disable()\natexit.register(gc.freeze)\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs(model={str(copy_checkpoint(tmp_path))!r}, max_model_len=256)"
        ".create_engine_config()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode != 0
    assert "unset VLLM_TARGET_DEVICE" in done.stderr


@pytest.mark.parametrize(
    ("connector", "words"),
    [
        ({"kv_connector": "NixlConnector"}, "NixlConnector is not supported for a diffusion model"),
        ({"kv_connector": "MultiConnector"}, "MultiConnector is not"),
        ({"kv_connector": "Own", "kv_connector_module_path": "somebodys"}, "Own is not"),
        ({"kv_connector": "OffloadingConnector"}, "--kv-offloading-size needs a GPU"),
        (CONNECTOR, "add --language-model-only"),
    ],
    ids=["nixl", "several", "own", "on a CPU", "images"],
)
def test_connectors(connector: dict[str, Any], words: str, tmp_path: Path) -> None:
    """None carries the cache to another server; to the memory of a GPU's machine one does, without pictures."""
    transfer = {"kv_role": "kv_both", **connector}
    assert words in refusal(copy_checkpoint(tmp_path), kv_transfer_config=transfer)


@pytest.mark.parametrize("name", ["fused_encode", "keep_last_canvas"])
def test_settings_that_are_gone(name: str, tmp_path: Path) -> None:
    """Each says what is done now."""
    message = refusal(copy_checkpoint(tmp_path), additional_config={"diffusion": {name: True}})
    assert f"{name} is gone: " in message


@pytest.mark.parametrize("rule", [None, "autoregressive"])
def test_pipeline_stages(rule: str | None) -> None:
    """Refused whatever the rule of a diffusion model is; stages of other models are vLLM's."""
    options: dict[str, Any] = {"pipeline_parallel_size": 2}
    assert configure(shipped_checkpoint("qwen3"), **options).parallel_config.world_size == 2
    if rule is not None:
        options["additional_config"] = {"diffusion": {"rule": rule}}
    assert "use --tensor-parallel-size" in refusal(shipped_checkpoint(), **options)


SKIP = {"additional_config": {"diffusion": {"skip_unlikely": True}}}


def test_skip_unlikely_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no soft embeddings, and where a row's sums must be a certain kernel's."""
    message = refusal(shipped_checkpoint("sdar"), **SKIP)
    assert "skip_unlikely" in message
    assert "leave it out" in message
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    message = refusal(copy_checkpoint(tmp_path), **SKIP)
    assert "skip_unlikely" in message
    assert "VLLM_BATCH_INVARIANT" in message


@pytest.mark.parametrize("given", [None, 3, 8, 128, 256])
def test_max_num_seqs(given: int | None, tmp_path: Path) -> None:
    """Three quarters of a pass's canvases; an operator's number, whatever it is."""
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    if given is not None:
        options["max_num_seqs"] = given
    config = configure(copy_checkpoint(tmp_path), max_num_batched_tokens=640, **options)
    canvases = 640 // config.diffusion_config.canvas_length
    expected = canvases - canvases // 4 if given is None else given
    assert expected != 8 or given == 8
    assert config.scheduler_config.max_num_seqs == expected
