"""The entry points are harmless to every vLLM command, and report problems for diffusion models."""

import logging
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import vllm.platforms
from vllm.model_executor.models import ModelRegistry, registry
from vllm.model_executor.models import config as models_config
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.engine.input_processor import InputProcessor

from vllm_diffusion import plugin
from vllm_diffusion.cpu.platform import DiffusionCpuPlatform
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaEngineConfig
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.hooks import upstream
from vllm_diffusion.requests import validation

pytestmark = pytest.mark.engine

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep vLLM's tables, and restore them after the test."""
    monkeypatch.setattr(models_config, "MODELS_CONFIG_MAP", dict(models_config.MODELS_CONFIG_MAP))
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    monkeypatch.setattr(InputProcessor, "process_inputs", InputProcessor.process_inputs)
    monkeypatch.setattr(DiffusionGemmaEngineConfig, "registration_failure", None)
    return monkeypatch


def test_register_twice(tables: pytest.MonkeyPatch) -> None:
    """A second registration changes nothing."""
    checks = set()
    for _ in range(2):
        plugin.register()
        assert models_config.MODELS_CONFIG_MAP[ARCHITECTURE] is DiffusionGemmaEngineConfig
        entry = ModelRegistry.models[ARCHITECTURE]
        assert entry.module_name == "vllm_diffusion.families.diffusion_gemma.model"
        checks.add(InputProcessor.process_inputs)
        assert DiffusionGemmaEngineConfig.registration_failure is None
    assert [check.__module__ for check in checks] == [validation.__name__]


def test_classes_that_vllm_brings(tables: pytest.MonkeyPatch) -> None:
    """The record of architectures that vLLM serves dates from before the first registration."""
    entries = {family.architecture: resolve_name(family.engine_config) for family in FAMILIES}
    for family in FAMILIES:
        tables.setattr(entries[family.architecture], "is_in_vllm", None)
        if family.architecture != ARCHITECTURE:
            ModelRegistry.models.pop(family.architecture, None)
    # As a later release may.
    ModelRegistry.register_model(
        "SDARForCausalLM", "vllm.model_executor.models.qwen3:Qwen3ForCausalLM"
    )
    for _ in range(2):
        plugin.register()
    brought = {name for name, entry in entries.items() if entry.is_in_vllm}
    assert brought == {ARCHITECTURE, "SDARForCausalLM"}


@pytest.mark.parametrize("platform", [DiffusionCpuPlatform, CpuPlatform])
def test_who_inspects_a_class(
    platform: type[CpuPlatform], tables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On our CPU platform no process is started to inspect a family's class. On another one vLLM
    starts one for each class. Other models have vLLM's entry on both.
    """
    tables.setattr(vllm.platforms, "current_platform", platform())
    tables.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    started: list[Any] = []
    tables.setattr(registry, "_run_in_subprocess", lambda job: [started.append(job), job()][1])
    plugin.register()
    lazy = registry._LazyRegisteredModel
    other = ModelRegistry.models["Qwen3ForCausalLM"]
    assert other == lazy("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM")
    for family in FAMILIES:
        info = ModelRegistry.models[family.architecture].inspect_model_cls()
        assert info.architecture == family.model.partition(":")[2]
        assert info.is_text_generation_model
    classes = {family.model for family in FAMILIES}
    assert len(started) == (0 if platform is DiffusionCpuPlatform else len(classes))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [ARCHITECTURE, "SDARForCausalLM"])
def test_class_is_inspected_as_by_vllm(
    architecture: str, tables: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What vLLM finds in a process of its own is what our CPU platform finds in this one."""
    tables.setattr(vllm.platforms, "current_platform", DiffusionCpuPlatform())
    tables.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    plugin.register()
    entry = ModelRegistry.models[architecture]
    stock = registry._LazyRegisteredModel(entry.module_name, entry.class_name)
    assert entry.inspect_model_cls() == stock.inspect_model_cls()
    # The second one wrote what it found, and ours read nothing.
    assert len(list(tmp_path.glob("modelinfos/*"))) == 1


def refusal_of_diffusion() -> str:
    """Return why a diffusion checkpoint is refused when it is configured."""
    with pytest.raises(ValueError, match="pip install") as error:
        models_config.MODELS_CONFIG_MAP[ARCHITECTURE].verify_and_update_config(object())
    return str(error.value)


@pytest.mark.parametrize(
    ("path", "has_check"),
    [
        ("vllm.model_executor.models.config.MODELS_CONFIG_MAP", False),
        ("vllm.model_executor.models.config", False),
        ("vllm.model_executor.models", False),
        ("vllm.v1.engine.input_processor.InputProcessor.process_inputs", True),
    ],
)
def test_register_never_raises(
    path: str, has_check: bool, tables: pytest.MonkeyPatch, vllm_log: pytest.LogCaptureFixture
) -> None:
    """A vLLM that lacks what we use still starts. The problem is reported when a diffusion
    checkpoint is configured, or by one logged error if no check could be put there.
    """
    if path in sys.modules:
        tables.setitem(sys.modules, path, None)
    else:
        tables.delattr(path)
    vllm_log.set_level(logging.DEBUG, "vllm")
    plugin.register()
    assert "vllm-diffusion could not register itself" in vllm_log.text
    if has_check:
        tables.setattr(upstream, "problem", lambda: None)
        assert re.search("could not register.*process_inputs", refusal_of_diffusion())
        return
    (record,) = (record for record in vllm_log.records if record.levelno == logging.ERROR)
    assert path.rpartition(".")[2] in record.getMessage()
    assert "pip install" in record.getMessage()


@pytest.mark.parametrize("installed", ["0.32.1", "0.34.0", "0.330.0", "1.33.0", None])
def test_unsupported_vllm_is_an_error_of_a_diffusion_checkpoint(
    installed: str | None, tables: pytest.MonkeyPatch
) -> None:
    """An unsupported vLLM is reported only when a diffusion checkpoint is configured."""
    tables.setattr(upstream, "installed_version", lambda: installed)
    plugin.register()
    assert DiffusionGemmaEngineConfig.registration_failure is None
    message = refusal_of_diffusion()
    assert "0.33" in message
    assert (installed or "no vLLM") in message
    assert "\n" not in message


@pytest.mark.parametrize("installed", ["0.33.0", "0.33.2", "0.33.1.post1", "0.33.0+cpu"])
def test_problem_supported_vllm(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every patch release of the supported version is accepted if its symbols are as known."""
    monkeypatch.setattr(upstream, "installed_version", lambda: installed)
    monkeypatch.setattr(upstream, "moved_symbols", lambda symbols: [])
    assert upstream.problem() is None


def test_problem_moved_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moved symbol is named in one sentence with a remedy."""
    moved = "vllm.somewhere:Thing.method"
    monkeypatch.setattr(upstream, "moved_symbols", lambda symbols: [f"{moved}\n  was: a\n  now: b"])
    message = upstream.problem()
    assert message is not None
    assert moved in message
    assert upstream.INSTALL in message
    assert "\n" not in message


def test_symbols_after_registration(tables: pytest.MonkeyPatch) -> None:
    """Replacements do not hide the original symbols from the comparison."""
    plugin.register()
    assert upstream.moved_symbols(upstream.read_symbols()) == []
