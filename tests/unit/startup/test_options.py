"""Every option of this vLLM was decided about, and what is refused says so in a sentence."""

from __future__ import annotations

import re
import typing
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from tests.robustness.serve_options import OPTIONS, explains
from vllm_diffusion.startup import kv_connectors, options
from vllm_diffusion.startup.kv_connectors import KNOWN, PACKAGES, REFUSED, check_kv_connectors
from vllm_diffusion.startup.options import refused_fields, sentences

pytestmark = pytest.mark.engine

# Refused by modules with more to do than that.
ELSEWHERE = {"--attention-backend", "--kv-transfer-config"}


def options_of_vllm() -> dict[str, str]:
    """Every option of ``vllm serve`` by its first long name, with its attribute."""
    from tests.robustness.serve_options import serve_parser

    found = {}
    for action in serve_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        found[names[0] if names else action.dest] = action.dest
    return found


def settings_of(attribute: str) -> list[str]:
    """Names of an option's own settings; empty unless it takes a configuration as JSON."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    for owner in (VllmConfig, EngineArgs):
        kinds = [field.type for field in fields(owner) if field.name == attribute]
        for kind in kinds:
            for one in (kind, *typing.get_args(kind)):
                if is_dataclass(one):
                    return [field.name for field in fields(one) if field.init]
    return []


def test_every_option_is_known() -> None:
    """A new option of vLLM fails here until somebody decides, and one that is gone until it goes.

    Where one setting of an option that takes JSON is known, all of them are.
    """
    known = {*OPTIONS.known, *sentences()}
    assert not set(OPTIONS.known) & set(sentences())
    expected = set()
    for name, attribute in options_of_vllm().items():
        expected.add(name)
        if any(each.startswith(f"{name}.") for each in known):
            expected |= {f"{name}.{setting}" for setting in settings_of(attribute)}
    assert sorted(expected - known) == [], "options that nobody decided about"
    assert sorted(known - expected) == [], "options that vLLM has not"


def test_settings_are_found() -> None:
    """The walk above sees the settings of a JSON option."""
    assert "backend" in settings_of("structured_outputs_config")
    assert "backend_per_kind" in settings_of("attention_config")
    assert settings_of("max_num_seqs") == []


def test_refusals_have_conditions() -> None:
    """What has a sentence is refused, and tried, and nothing else is."""
    in_code = [*options.EARLY_CONDITIONS, *options.CONDITIONS, *ELSEWHERE]
    conditions = [*refused_fields(), *in_code]
    assert sorted(conditions) == sorted(sentences())
    # The shipped checkpoint has experts.
    assert set(sentences()) - set(OPTIONS.refused) == {"--enable-expert-parallel"}


@pytest.mark.parametrize("name", sentences())
def test_sentences(name: str) -> None:
    """One sentence that names what was set, and is recognised with values in place."""
    line = sentences()[name]
    assert "\n" not in line
    assert line.endswith(".")
    stem = name.removeprefix("--").partition(".")[0]
    assert stem in line or stem.replace("-", "_") in line
    assert explains(line, line)
    assert explains(line, re.sub(r"\{[\w.]+\}", "3 or 4", line))
    assert not explains(line, "Before. " + line)


def config(
    name: str | None = "MemoryConnector",
    role: str = "kv_both",
    *,
    images: bool = False,
    num_stages: int = 1,
    offloading_size: float | None = None,
    **settings: Any,
) -> Any:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector=name, kv_role=role, **settings) if name else None
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        cache_config=SimpleNamespace(kv_offloading_size=offloading_size),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(language_model_only=not images)
        ),
    )


def test_every_connector_is_known() -> None:
    """A new one of vLLM fails here until somebody decides."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert set(KNOWN) == set(KVConnectorFactory._registry)


@pytest.mark.parametrize(
    "name", [*REFUSED, "OffloadingConnector", "SimpleCPUOffloadConnector", "Nonesuch"]
)
def test_refused(name: str) -> None:
    """By itself, and as one of several."""
    with pytest.raises(ValueError, match=f"^--kv-transfer-config: {name} .*; .*\\.$"):
        check_kv_connectors(config(name))
    several = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"}]}
    with pytest.raises(ValueError, match=f"^--kv-transfer-config: {name} "):
        check_kv_connectors(config("MultiConnector", kv_connector_extra_config=several))


@pytest.mark.parametrize("name", PACKAGES)
def test_missing_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector whose package is not installed says which."""
    monkeypatch.setattr(kv_connectors, "find_spec", lambda module: None)
    with pytest.raises(ValueError, match=f"{name} needs the package {PACKAGES[name]},"):
        check_kv_connectors(config(name))


def test_stages() -> None:
    """NIXL serves one; somebody's own may serve several."""
    with pytest.raises(ValueError, match="NixlConnector is not served with stages; leave --pipe"):
        check_kv_connectors(config("NixlConnector", num_stages=2))
    check_kv_connectors(
        config(num_stages=2, kv_connector_module_path="tests.support.memory_connector")
    )


def test_taken() -> None:
    """Somebody's own, and offloading that somebody else's code does."""
    own = {"kv_connector_module_path": "tests.support.memory_connector"}
    check_kv_connectors(config(**own))
    check_kv_connectors(
        config(
            "MultiConnector",
            kv_connector_extra_config={"connectors": [{"kv_connector": "MemoryConnector", **own}]},
        )
    )
    spec = {"spec_name": "TorchSpec", "spec_module_path": "tests.support.torch_offloading"}
    check_kv_connectors(config("OffloadingConnector", kv_connector_extra_config=spec))
    check_kv_connectors(config(None))


def test_malformed() -> None:
    with pytest.raises(ValueError, match='"connectors"'):
        check_kv_connectors(config("MultiConnector"))
    with pytest.raises(ValueError, match='kv_buffer_device "cuda" needs a GPU'):
        check_kv_connectors(config(kv_buffer_device="cuda"))


def test_embeddings_of_images() -> None:
    """vLLM has every server that loads take them, and this package's model takes none."""
    own = {"kv_connector_module_path": "tests.support.memory_connector"}
    for refused in (config(images=True, **own), config(None, images=True, offloading_size=1.0)):
        with pytest.raises(ValueError, match="--language-model-only"):
            check_kv_connectors(refused)
    check_kv_connectors(config(role="kv_producer", images=True, **own))
