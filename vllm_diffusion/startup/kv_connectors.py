"""Checks of vLLM's KV connectors for a diffusion model (``--kv-transfer-config``).

A connector carries blocks of the KV cache to another server, or to a store. Connectors that cannot
work are refused by name before anything is loaded; docs/operate/disaggregation.md lists what is known about
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm_diffusion.startup.refused_options import refusal

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Connector:
    """Facts about one of vLLM's connectors.

    Attributes:
        refused: Reason why it cannot serve a diffusion model, and the remedy; empty if it can.
        module: Module of a package that it needs and vLLM does not install; empty if none.
        needs_gpu: True if it copies from a GPU's memory.
        has_one_stage: True if it is refused with pipeline stages: vLLM's NIXL supports them with
            some caches and roles only, none of which was tried.
    """

    refused: str = ""
    module: str = ""
    needs_gpu: bool = False
    has_one_stage: bool = False


CONNECTORS: dict[str, Connector] = {
    "NixlConnector": Connector(module="nixl", has_one_stage=True),
    "NixlPullConnector": Connector(module="nixl", has_one_stage=True),
    "NixlPushConnector": Connector(module="nixl", has_one_stage=True),
    "MultiConnector": Connector(),
    "OffloadingConnector": Connector(needs_gpu=True),
    "SimpleCPUOffloadConnector": Connector(needs_gpu=True),
    "LMCacheConnectorV1": Connector(module="lmcache"),
    "LMCacheMPConnector": Connector(module="lmcache"),
    "MooncakeConnector": Connector(module="mooncake"),
    "MooncakeStoreConnector": Connector(module="mooncake"),
    "MoRIIOConnector": Connector(module="mori"),
    "FlexKVConnectorV1": Connector(module="flexkv"),
    # Without it vLLM would run a mock.
    "HF3FSKVConnector": Connector(module="hf3fs_fuse"),
    "ExampleConnector": Connector(
        "is vLLM's example, which ends the engine at a prompt that begins as one it keeps; set "
        "kv_connector to NixlConnector"
    ),
    "ExampleHiddenStatesConnector": Connector(
        "stores hidden states of speculative decoding, which a diffusion model does not do; leave it "
        "out"
    ),
    "DecodeBenchConnector": Connector(
        "fills the cache with made-up keys and values, from which no canvas converges; leave it out"
    ),
    "HiSparseConnector": Connector("is for sparse attention, of other models; leave it out"),
}


def check_kv_connectors(vllm_config: VllmConfig) -> None:
    """Refuse a connector that cannot work with diffusion models or on this machine.

    Raises:
        ValueError: Naming the connector and the remedy.
    """
    if _takes_embeddings(vllm_config):
        _refuse(
            "a server that loads keys and values (with --kv-offloading-size too) lets clients send "
            "embeddings in place of images, which DiffusionGemma does not take; add "
            "--language-model-only, or leave it out"
        )
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    _check(
        {
            "kv_connector": transfer.kv_connector,
            "kv_connector_module_path": transfer.kv_connector_module_path,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
            "kv_buffer_device": transfer.kv_buffer_device,
        },
        vllm_config.parallel_config.pipeline_parallel_size,
    )


def _check(settings: Mapping[str, Any], num_stages: int) -> None:
    """Check one connector, and those that it consists of."""
    from vllm.platforms import current_platform

    device = settings.get("kv_buffer_device", "cpu")
    if current_platform.is_cpu() and device != "cpu":
        _refuse(f'kv_buffer_device "{device}" needs a GPU; leave it out')
    if settings.get("kv_connector_module_path"):
        # A connector outside vLLM is not checked.
        return
    name, extra = settings.get("kv_connector"), settings.get("kv_connector_extra_config") or {}
    connector = CONNECTORS.get(str(name))
    if connector is None:
        _refuse(f"{name} is not known to vLLM 0.33; set kv_connector to NixlConnector")
        return
    if connector.refused:
        _refuse(f"{name} {connector.refused}")
    # A specification outside vLLM copies by itself.
    if connector.needs_gpu and current_platform.is_cpu() and not extra.get("spec_module_path"):
        _refuse(f"{name} needs a GPU, whose cache it moves to the CPU's memory; leave it out")
    if connector.has_one_stage and num_stages > 1:
        _refuse(
            f"{name} is not served with stages; leave --pipeline-parallel-size out, and divide the model "
            "with --tensor-parallel-size"
        )
    if connector.module and find_spec(connector.module) is None:
        _refuse(f"{name} needs the package {connector.module}, which is not installed; install it")
    if name == "MultiConnector":
        children = extra.get("connectors")
        if not isinstance(children, list) or not all(isinstance(c, Mapping) for c in children):
            _refuse('MultiConnector needs its "connectors"; list them in kv_connector_extra_config')
            return
        for child in children:
            _check(child, num_stages)


def _refuse(sentence: str) -> None:
    raise ValueError(refusal("--kv-transfer-config", sentence=sentence))


def _takes_embeddings(vllm_config: VllmConfig) -> bool:
    """Return true if vLLM will set ``--enable-mm-embeds`` by itself, after our check of options."""
    transfer = vllm_config.kv_transfer_config
    offloads = vllm_config.cache_config.kv_offloading_size is not None
    if not offloads and (transfer is None or not transfer.is_kv_consumer):
        return False
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is not None and not multimodal.language_model_only
