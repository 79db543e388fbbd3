"""``kv_transfer_params`` of a request: what two engines tell each other, by way of a proxy.

vLLM takes them for what its own engines wrote. One that is missing leaves a request waiting for ever,
and one of another type ends the engine.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

# Connectors whose parameters are known here: those of NIXL that read.
_NIXL = ("NixlConnector", "NixlPullConnector")
_NIXL_NEEDS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "tp_size",
)


_Name = Annotated[str, Meta(min_length=1)]
_Port = Annotated[int, Meta(ge=1, lt=65536)]
_Size = Annotated[int, Meta(ge=1)]
_Count = Annotated[int, Meta(ge=0)]
_BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
_Blocks = Annotated[list[list[_BlockId]], Meta(min_length=1)]
# What a value must be: in words, as a type, and of which parameters.
_KINDS: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("true or false", bool, ("do_remote_prefill", "do_remote_decode")),
    ("a string", _Name, ("remote_engine_id", "remote_request_id", "remote_host")),
    ("a port", _Port, ("remote_port",)),
    ("a list of lists of block ids", _Blocks, ("remote_block_ids",)),
    ("an integer of at least 1", _Size, ("tp_size", "dcp_size", "pp_size")),
    (
        "an integer of at least 0",
        _Count,
        ("remote_num_tokens", "remote_registration_generation"),
    ),
    ("a number", _Count | float, ("remote_blocks_expiry_time",)),
)


def reads_by_nixl(kv_transfer_config: Any) -> bool:
    """Return true if a server reads the parameters that this module checks.

    Args:
        kv_transfer_config: vLLM's configuration; ``None`` without a connector.
    """
    return kv_transfer_config is not None and any(map(kv_transfer_config.has_connector, _NIXL))


def form_problem(params: Any, num_answers: int, kv_transfer_config: Any) -> tuple[str, str] | None:
    """Find what is wrong with parameters by themselves.

    Args:
        params: ``kv_transfer_params`` of a request.
        num_answers: Its ``n``.
        kv_transfer_config: vLLM's configuration of the server; ``None`` without a connector.

    Returns:
        The field and its problem, or ``None``.
    """
    if not isinstance(params, Mapping):
        return "kv_transfer_params", f"must be a mapping; got {reprlib.repr(params)}."
    if not reads_by_nixl(kv_transfer_config):
        return None
    for words, kind, names in _KINDS:
        for name in names:
            value = params.get(name)
            try:
                msgspec.convert(value, kind | None)
            except msgspec.ValidationError:
                return f"kv_transfer_params.{name}", f"must be {words}; got {reprlib.repr(value)}."
    loads, hands_over = params.get("do_remote_prefill"), params.get("do_remote_decode")
    if loads and hands_over:
        return (
            "kv_transfer_params.do_remote_decode",
            "cannot be combined with do_remote_prefill: the prompt is prefilled here or elsewhere.",
        )
    missing = [name for name in _NIXL_NEEDS if params.get(name) is None]
    if loads and missing:
        return (
            f"kv_transfer_params.{missing[0]}",
            "is missing; send what the prefilling server's response has in kv_transfer_params.",
        )
    if (loads or hands_over) and num_answers > 1:
        return (
            "n",
            "must be 1 with kv_transfer_params, which are of one request; send as many requests, or "
            "leave kv_transfer_params out.",
        )
    return None


def agreement_problem(
    params: Mapping[str, Any],
    *,
    num_prefilled: int,
    num_groups: int,
    loading: Iterable[str | None],
) -> str | None:
    """Return why another engine's blocks cannot be a request's prompt; ``None`` if they can.

    Args:
        params: ``kv_transfer_params`` of the request, which passed :func:`form_problem`.
        num_prefilled: Tokens of its prompt that are prefilled before its canvas.
        num_groups: Groups of cached layers of this engine.
        loading: ``remote_request_id`` of this engine's requests.
    """
    if (num_remote := params.get("remote_num_tokens")) is not None and (
        num_remote != num_prefilled
    ):
        return (
            f"kv_transfer_params.remote_num_tokens is {num_remote}, and this prompt is prefilled "
            f"up to token {num_prefilled}: the prefilling server was sent another one"
        )
    blocks = params.get("remote_block_ids")
    if blocks is not None and len(blocks) != num_groups:
        return (
            f"kv_transfer_params.remote_block_ids has {len(blocks)} lists, and this model has "
            f"{num_groups}: the prefilling server has another model, or other options"
        )
    if (remote := params.get("remote_request_id")) is not None and remote in loading:
        return (
            "kv_transfer_params.remote_request_id is that of a request which is being answered: a "
            "prefilled prompt is taken once"
        )
    return None
