"""A file of tuned kernels serves where it was measured, and says in a line why it does not elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from tests.support.checkpoints import copy_checkpoint
from vllm_diffusion.attention.backend import CanvasAttentionImpl
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.kernel_choice import on_ranks, tuned_file
from vllm_diffusion.kernel_choice.tuned_file import TunedFor, apply_tuned, read_tuned, tuned_json
from vllm_diffusion.startup.kernel_choices import PHASES, KernelChoices, kernel_choices

pytestmark = pytest.mark.engine

GPU = "NVIDIA H200 9.0"
# The CPU platform's, by which configurations are made.
IS_CUDA = type(current_platform).is_cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPU that there seems to be, once a configuration was made."""
    name = [GPU]
    monkeypatch.setattr(tuned_file, "gpu_name", lambda device: name[0])
    return name


def configure(monkeypatch: pytest.MonkeyPatch, model: Path | None = None, **diffusion: Any) -> Any:
    """A server's configuration, made on the CPU, whose platform is CUDA from then on."""
    arguments = EngineArgs(
        str(model or shipped_checkpoint()),
        max_model_len=1024,
        additional_config={"diffusion": diffusion},
    )
    with pytest.MonkeyPatch.context() as meanwhile:
        # It is applied by the test, on a GPU.
        meanwhile.setattr(type(current_platform), "is_cuda", IS_CUDA)
        meanwhile.setattr(tuned_file, "apply_tuned", lambda config: None)
        config = arguments.create_engine_config()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    return config


@pytest.fixture
def measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: list[str]
) -> tuple[Path, KernelChoices]:
    """A file for the shipped checkpoint, and its choices."""
    config = configure(monkeypatch)
    described = TunedFor.of(config)
    (kind,) = dict.fromkeys(described.served["attention layers"][:1])
    kernels = KernelChoices(
        attention={kind: {"denoise": "cute", "mixed": "triton"}},
        most_splits={kind: {"denoise": 2, "mixed": 8}},
        skip_unlikely=True,
        two_streams=True,
    )
    path = tmp_path / "tuned.json"
    path.write_text(
        tuned_json(described, kernels, {"sampler": {"one stream": 12.5}}), encoding="utf-8"
    )
    return path, kernels


def refusal(config: Any) -> str:
    """The line with which a start ends."""
    with pytest.raises(ValueError, match="tuned=") as raised:
        apply_tuned(config)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("--additional-config '{\"diffusion\": {...}}': tuned=")
    assert message.endswith(
        "measure with `vllm-diffusion tune` and this server's options, or leave tuned out."
    )
    assert not hasattr(config.model_config, "tuned_kernels")
    return message


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(
    st.builds(
        KernelChoices,
        attention=st.dictionaries(
            NAMES, st.dictionaries(st.sampled_from(PHASES), st.sampled_from(["triton", "cute"]))
        ),
        most_splits=st.dictionaries(
            NAMES, st.dictionaries(st.sampled_from(PHASES), st.integers(1, 8))
        ),
        skip_unlikely=st.booleans(),
        two_streams=st.booleans(),
    )
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, kernels: KernelChoices) -> None:
    """What is written is read again."""
    path = tmp_path_factory.mktemp("tuned") / "tuned.json"
    described = TunedFor(GPU, {"canvas length": 8}, {"torch": "2"})
    path.write_text(tuned_json(described, kernels, {}), encoding="utf-8")
    assert read_tuned(path) == (described, kernels)


def test_servers_that_share_a_file_compute_alike(
    measured: tuple[Path, KernelChoices], monkeypatch: pytest.MonkeyPatch, vllm_log: Any
) -> None:
    """Two servers get the same kernels, each choice is a line of both logs, and their layers run them."""
    path, kernels = measured
    logs = []
    for _ in range(2):
        config = configure(monkeypatch, tuned=str(path))
        vllm_log.clear()
        apply_tuned(config)
        assert kernel_choices(config) == kernels
        logs.append([record.getMessage() for record in vllm_log.records])
    assert logs[0] == logs[1]
    (kind,) = kernels.attention
    assert logs[0] == [
        f"tuned={str(path)!r}: attention of {kind}, denoise: cute, splits up to 2.",
        f"tuned={str(path)!r}: attention of {kind}, mixed: triton, splits up to 8.",
        f"tuned={str(path)!r}: skip_unlikely: true.",
        f"tuned={str(path)!r}: streams of the sampler: 2.",
    ]


def test_layers_run_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer cuts its keys as its kind and the phase of the pass say, others as they choose."""
    config = configure(monkeypatch)
    kernels = KernelChoices(
        attention={"4 heads on 2 of 16, full": {"denoise": "reference"}},
        most_splits={"4 heads on 2 of 16, full": {"denoise": 2}},
    )
    config.model_config.tuned_kernels = kernels
    with set_current_vllm_config(config):
        layer, other = (CanvasAttentionImpl(4, size, 0.25, 2) for size in (16, 32))
    assert layer.impls == {"denoise": "reference", "mixed": "auto"}
    assert layer.most_splits == {"denoise": 2, "mixed": 8}
    assert layer._options("canvas", 2).most_splits == 2
    assert (other.impls["denoise"], other.most_splits["denoise"]) == ("auto", 8)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert layer._options("canvas", 2).most_splits == 1


def test_explicit_settings_win(
    measured: tuple[Path, KernelChoices], monkeypatch: pytest.MonkeyPatch, vllm_log: Any
) -> None:
    """What the operator sets is served, and the log says that the file's choice is not."""
    path, kernels = measured
    config = configure(monkeypatch, tuned=str(path), attention="triton", skip_unlikely=False)
    apply_tuned(config)
    found = kernel_choices(config)
    assert (found.default_attention, found.attention, found.most_splits) == ("triton", {}, {})
    assert (found.skip_unlikely, found.two_streams) == (False, True)
    assert 'the setting attention="triton" wins over its choices of attention' in vllm_log.text
    assert "the setting skip_unlikely=false wins over its choice" in vllm_log.text


def test_another_gpu_is_refused(
    measured: tuple[Path, KernelChoices], monkeypatch: pytest.MonkeyPatch, gpu: list[str]
) -> None:
    """Both GPUs are named, and a machine without one says so."""
    config = configure(monkeypatch, tuned=str(measured[0]))
    gpu[0] = "NVIDIA H100 PCIe 9.0"
    assert f"was measured on {GPU}, and this server has NVIDIA H100 PCIe 9.0" in refusal(config)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    assert "is for NVIDIA GPUs, and this server has none" in refusal(config)


def test_another_model_or_option_is_refused(
    measured: tuple[Path, KernelChoices], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first difference is named."""
    path, _ = measured
    other = configure(monkeypatch, shipped_checkpoint("sdar"), tuned=str(path))
    assert "was measured for model: DiffusionGemma" in refusal(other)
    config = configure(monkeypatch, tuned=str(path), window_anchor="query")
    assert "was measured for window_anchor: canvas, and this server has query" in refusal(config)
    config = configure(monkeypatch, tuned=str(path))
    config.cache_config.cache_dtype = "fp8"
    assert "fp8 cache" in refusal(config)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config.cache_config.cache_dtype = "auto"
    assert "VLLM_BATCH_INVARIANT: False, and this server has True" in refusal(config)


@pytest.mark.parametrize("name", ["torch", "kernels"])
def test_another_build_is_ignored(
    measured: tuple[Path, KernelChoices],
    monkeypatch: pytest.MonkeyPatch,
    vllm_log: Any,
    name: str,
) -> None:
    """A stale file is one line, and the server starts with the defaults."""
    path, _ = measured
    content = json.loads(path.read_text("utf-8"))
    content["build"][name] = "0.1"
    path.write_text(json.dumps(content), encoding="utf-8")
    config = configure(monkeypatch, tuned=str(path))
    vllm_log.clear()
    apply_tuned(config)
    (record,) = vllm_log.records
    assert f"is ignored: it was measured with {name} 0.1, and here is " in record.getMessage()
    assert kernel_choices(config) == KernelChoices()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": None}, "its field gpu is missing or wrong"),
        ({"served": 3}, "its field served is missing or wrong"),
        ({"format": 9}, "has format 9, and this version reads 1"),
        ({"statistics": "fast"}, "a wrong field kernels: statistics='fast' is not one of"),
        ({"speed": 1}, "a wrong field kernels: speed is not a choice of kernels"),
        ({"attention": {"a": 1}}, "attention={'a': 1} must be an object of kinds of layers"),
        (
            {"attention": {"a": {"b": "cute"}}},
            "phase 'b' of attention is not one of denoise, mixed",
        ),
        (
            {"most_splits": {"a": {"mixed": 0}}},
            "most_splits of a, mixed=0 must be an integer from 1",
        ),
        ({"two_streams": "yes"}, "two_streams='yes' must be true or false"),
    ],
    ids=str,
)
def test_a_damaged_field_is_named(
    measured: tuple[Path, KernelChoices],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    """A file that somebody wrote or cut; what is no field of it is one of its kernels."""
    path, _ = measured
    content = json.loads(path.read_text("utf-8"))
    part = content if content.keys() >= changes.keys() else content["kernels"]
    part.update(changes)
    path.write_text(json.dumps(content), encoding="utf-8")
    assert words in refusal(configure(monkeypatch, tuned=str(path)))


def test_a_file_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: list[str]
) -> None:
    """No file, no JSON, JSON of something else, a folder, and a pipe that nobody writes to."""
    files = {
        "missing": "cannot be read (No such file or directory)",
        "empty": "is not JSON",
        "binary": "is not JSON",
        "deep": "is not JSON",
        "list": "its field format is missing or wrong",
        "folder": "is no file",
        "pipe": "is no file",
    }
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "list").write_text("[1]")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, words in files.items():
        config = configure(monkeypatch, tuned=str(tmp_path / name))
        assert words in refusal(config), name


@pytest.mark.parametrize("value", [3, "", True])
def test_a_value_that_is_no_path(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with every other setting."""
    with pytest.raises(pydantic.ValidationError, match="must be the path of a file"):
        configure(monkeypatch, tuned=value)


def test_a_start_reads_the_file(tmp_path: Path) -> None:
    """A server's configuration is refused by its own start, in one line and before weights are read."""
    model = copy_checkpoint(tmp_path)
    arguments = EngineArgs(
        str(model), max_model_len=1024, additional_config={"diffusion": {"tuned": "/no/such/file"}}
    )
    with pytest.raises(pydantic.ValidationError) as raised:
        arguments.create_engine_config()
    (only,) = raised.value.errors()
    assert "tuned='/no/such/file' cannot be read" in only["msg"]


def test_a_kernel_that_the_check_replaces_is_a_warning(
    measured: tuple[Path, KernelChoices], monkeypatch: pytest.MonkeyPatch, vllm_log: Any
) -> None:
    """Replicas then differ, which one line says; where nothing was replaced there is none."""
    path, kernels = measured
    config = configure(monkeypatch, tuned=str(path))
    apply_tuned(config)
    monkeypatch.setattr(on_ranks, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(
        type(current_platform),
        "logical_device_id_to_visible_device_id",
        lambda *_: 0,
        raising=False,
    )
    for decided, warns in ((kernels, False), (KernelChoices(), True)):
        vllm_log.clear()
        monkeypatch.setattr(on_ranks, "checked_choices", lambda *_, decided=decided, **__: decided)
        assert on_ranks.decide(config, 0) == decided
        assert ("replicas whose GPUs pass it compute otherwise" in vllm_log.text) == warns
