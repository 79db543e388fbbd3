"""The table of KV connectors is whole, and what it refuses is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.startup import kv_connectors
from vllm_diffusion.startup.kv_connectors import KNOWN, PACKAGES, REFUSED, check_kv_connectors

pytestmark = pytest.mark.engine


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
