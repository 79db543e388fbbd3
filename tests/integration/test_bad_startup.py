"""A server that cannot serve its options reports it in one sentence before it loads."""

import errno
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.commands import run
from tests.support.engines.refused import refusal, refusal_of_row, rows_of
from tests.support.engines.stock import run_in_stock
from tests.support.engines.vllm_configs import configure
from tests.support.models.checkpoints import SHIPPED, copy_checkpoint
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = pytest.mark.engine

FILES = ("config", "text_config", "generation_config")
# Of google/diffusiongemma-26B-A4B-it.
PUBLISHED = {
    "max_denoising_steps": 48,
    "entropy_bound": 0.1,
    "confidence_threshold": 0.005,
    "stability_threshold": 1,
    "t_min": 0.4,
    "t_max": 0.8,
}


@pytest.mark.parametrize("row", rows_of(__file__, "refused"))
def test_refused(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the table is refused by the name of what is wrong, with the remedy."""
    for name, value in row.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    if "family" in row:
        checkpoint = shipped_checkpoint(row["family"])
    else:
        checkpoint = copy_checkpoint(tmp_path, **{name: row.get(name) for name in FILES})
    refusal_of_row(row, checkpoint)


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose /dev/shm cannot be written is refused by the folder's name."""

    def lock(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(multiprocessing.context.SpawnContext, "Lock", lock)
    message = refusal(SHIPPED)
    assert "in /dev/shm (Read-only file system)" in message
    assert "--shm-size" in message


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_refused_in_stock(tmp_path: Path) -> None:
    """Without the check, vLLM's engine ends later without the file's name, or answers wrongly."""
    rows = [row.values[0] for row in rows_of(__file__, "refused")]
    rows = [row for row in rows if set(FILES) & row.keys()]
    rows = [row for row in rows if "load_format" not in row.get("options", {})]
    jobs: list[dict[str, Any]] = [{"model": str(SHIPPED)}]
    for i, row in enumerate(rows):
        folder = copy_checkpoint(tmp_path / str(i), **{name: row.get(name) for name in FILES})
        jobs.append({"model": str(folder), **row.get("options", {})})
    # A canvas length that is absent or none, and settings that cannot be read.
    for stock, name, old, new in (
        (
            "answers: with canvases of 256, whatever it was trained with",
            "config",
            '"canvas_length": 32,',
            "",
        ),
        ("start", "config", '"canvas_length": 32', '"canvas_length": null'),
        ("load", "generation_config", "{", ""),
    ):
        folder = copy_checkpoint(tmp_path / f"text {len(jobs)}")
        path = folder / f"{name}.json"
        path.write_text(path.read_text().replace(old, new))
        rows.append({"stock": stock})
        jobs.append({"model": str(folder)})
    good, *outcomes = run_in_stock(jobs)
    assert any(good["tokens"])
    for row, outcome in zip(rows, outcomes, strict=True):
        stage, _, wrong = row["stock"].partition(": ")
        assert outcome.get("stage", "answers") == stage, (row, outcome)
        assert "config.json" not in outcome.get("error", ""), (row, outcome)
        assert ("token 0" in wrong) == ("tokens" in outcome and not any(outcome["tokens"]))


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ({"generation_config": {"t_min": 0.0}}, {}),
        ({"text_config": {"final_logit_softcapping": -30.0}}, {}),
        ({"text_config": {"final_logit_softcapping": -30}}, {}),
        ({"config": {"image_token_id": 320}}, {"language_model_only": True}),
        # Two canvases a pass; for less the table has a row.
        ({}, {"max_num_batched_tokens": 64, "max_num_seqs": 1}),
    ],
    ids=str,
)
def test_served_as_stock_does(
    files: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """A final temperature of 0, a softcap's sign, unused numbers of images and the smallest pass
    are accepted.
    """
    configure(copy_checkpoint(tmp_path, **files), **options)


@pytest.mark.parametrize("is_in_vllm", [True, False])
def test_class_of_the_same_name(
    is_in_vllm: bool,
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If vLLM has a class of the same architecture, a log line names the one that runs."""
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
        "DiffusionGemmaForBlockDiffusion: using vllm-diffusion's class" in line for line in lines
    )


def test_published_values() -> None:
    """The published values are those of transformers for a file without them."""
    from transformers import DiffusionGemmaGenerationConfig

    stock = DiffusionGemmaGenerationConfig._get_default_generation_params()
    stock["entropy_bound"] = stock["sampler_config"].entropy_bound
    assert PUBLISHED.items() <= stock.items()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"t_min": 0.4,', "not valid JSON"),
        ("[1, 2]", "must hold a JSON object"),
        ("", "not valid JSON"),
    ],
)
def test_generation_config_file(content: str, reason: str, tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    (copy_checkpoint(tmp_path) / "generation_config.json").write_text(content)
    assert re.search(f"generation_config.json.*{reason}", refusal(tmp_path))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"t_min": None}, ["t_min"]),
        ({"sampler_config": None}, ["entropy_bound"]),
        ({"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig"}}, ["entropy_bound"]),
        ({"sampler_config": {}}, ["entropy_bound"]),
        (None, [*PUBLISHED]),
    ],
    ids=str,
)
def test_settings_that_are_missing(
    changes: dict[str, Any] | None,
    missing: list[str],
    tmp_path: Path,
    start_log: pytest.LogCaptureFixture,
) -> None:
    """A missing key, or each without the file, has the published value, and a log line names it."""
    folder = copy_checkpoint(tmp_path, generation_config=changes)
    if changes is None:
        (folder / "generation_config.json").unlink()
    spec = configure(folder).model_config.diffusion.spec
    values = {"max_denoising_steps": spec.max_denoising_steps, **spec.settings}
    assert {name: values[name] for name in missing} == {name: PUBLISHED[name] for name in missing}
    (line,) = [line for line in start_log.messages if "published values" in line]
    assert all(f"{name} ({PUBLISHED[name]})" in line for name in missing)


def test_all_missing_fields_at_once() -> None:
    """A family without published values names every field that a file lacks."""
    from vllm_diffusion.startup.denoising_settings import Published

    published = Published({"t_min": 0.4}, "file.json", keys={"t_max": "schedule.t_max"})
    published.check_present(["t_min"])
    with pytest.raises(ValueError, match="has no schedule.t_max, steps, which") as raised:
        published.check_present(["t_min", "t_max", "steps"])
    assert """'{"diffusion": {"t_max": ..., "steps": ...}}'""" in str(raised.value)


@pytest.mark.parametrize("value", ["", '"canvas_length": null,'], ids=["absent", "null"])
def test_canvas_length(value: str, tmp_path: Path) -> None:
    """A missing or invalid canvas length is refused by name."""
    path = copy_checkpoint(tmp_path) / "config.json"
    path.write_text(path.read_text().replace('"canvas_length": 32,', value))
    message = refusal(tmp_path)
    assert "canvas_length" in message
    assert "config.json" in message


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
    """vLLM's own --diffusion-config is checked, by vLLM or by this package."""
    with pytest.raises((ValueError, TypeError), match=word):
        configure(copy_checkpoint(tmp_path), diffusion_config={"canvas_length": 32, **config})


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
    """A pass too small for a video logs that; a request with one is refused, others are served."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    def offered(**more: Any) -> list[str]:
        """Return what a request may contain."""
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


@pytest.mark.parametrize("name", ["model-2.safetensors", "generation_config.json"])
def test_named_pipe(name: str, tmp_path: Path) -> None:
    """A named pipe in a checkpoint's folder is reported, and not waited for."""
    folder = copy_checkpoint(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    message = refusal(folder)
    assert f"{folder} holds {name}, which is a named pipe and not a regular file" in message
    assert "again" in message


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:100_000], id="truncated"),
        pytest.param(lambda content: content[:100], id="truncated in its header"),
        pytest.param(lambda content: b"", id="empty"),
        pytest.param(lambda content: content[:8] + b"{{{{" + content[12:], id="damaged header"),
        pytest.param(lambda content: b"\xff" * 8 + content[8:], id="no header"),
    ],
)
def test_damaged_weights(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A damaged file is named before the engine starts."""
    path = copy_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert re.search(r"model\.safetensors.*truncated.*again", refusal(tmp_path))
    configure(tmp_path, load_format="dummy")


@pytest.mark.slow
def test_target_device_set(tmp_path: Path) -> None:
    """VLLM_TARGET_DEVICE=cpu, which disables platform plugins, is reported with a remedy."""
    program = (
        # What collections would walk is the million objects of the import.
        "import atexit, gc\ngc.disable()\natexit.register(gc.freeze)\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs(model={str(copy_checkpoint(tmp_path))!r}, max_model_len=256)"
        ".create_engine_config()\n"
    )
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    done = run(sys.executable, "-c", program, status=1, env=environment, timeout=600)
    assert "unset VLLM_TARGET_DEVICE" in done.stderr


@pytest.mark.parametrize("given", [None, 3, 8, 128, 256])
def test_max_num_seqs(given: int | None, tmp_path: Path) -> None:
    """By default three quarters of a pass's canvases run; an operator's number is kept."""
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    if given is not None:
        options["max_num_seqs"] = given
    config = configure(copy_checkpoint(tmp_path), max_num_batched_tokens=640, **options)
    canvases = 640 // config.diffusion_config.canvas_length
    expected = canvases - canvases // 4 if given is None else given
    assert expected != 8 or given == 8
    assert config.scheduler_config.max_num_seqs == expected
