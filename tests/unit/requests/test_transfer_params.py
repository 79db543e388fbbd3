"""``kv_transfer_params``: what a proxy passes on is taken, and anything else is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.requests.bounds import agreement_problem, form_problem

NIXL = SimpleNamespace(has_connector=lambda name: name == "NixlConnector")
OTHER = SimpleNamespace(has_connector=lambda name: name == "MooncakeConnector")
# What a prefilling server of vLLM 0.33 answers with.
LOADS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[0, 8, 9], [10, 11, 12]],
    "remote_engine_id": "b1ff",
    "remote_request_id": "cmpl-1-0",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 41,
    "remote_blocks_expiry_time": None,
    "remote_registration_generation": 1,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


@pytest.mark.parametrize(
    "params",
    [
        LOADS,
        {"do_remote_decode": True},
        {},
        {"do_remote_decode": True, **LOADS, "do_remote_prefill": False},
    ],
)
def test_taken(params: dict[str, Any]) -> None:
    assert form_problem(params, 1, NIXL) is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"remote_engine_id": 7}, "remote_engine_id"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_block_ids": "0"}, "remote_block_ids"),
        ({"remote_block_ids": [0, 1]}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": []}, "remote_block_ids"),
        ({"tp_size": 0}, "tp_size"),
        ({"remote_num_tokens": 1.5}, "remote_num_tokens"),
        *(({name: None}, name) for name in ("remote_port", "remote_block_ids", "tp_size")),
    ],
)
def test_field_is_named(changes: dict[str, Any], field: str) -> None:
    """Of wrong types, missing, and contradicting ones."""
    problem = form_problem(LOADS | changes, 1, NIXL)
    assert problem is not None
    assert problem[0] == f"kv_transfer_params.{field}"


@given(
    st.dictionaries(
        st.sampled_from(list(LOADS)),
        st.none() | st.integers() | st.text() | st.lists(st.lists(st.integers())),
    )
)
def test_any_value(changes: dict[str, Any]) -> None:
    """Whatever a client sends, it is taken or a field is named."""
    problem = form_problem(LOADS | changes, 1, NIXL)
    assert problem is None or problem[0].removeprefix("kv_transfer_params.") in LOADS


def test_one_answer() -> None:
    """Parameters are of one request, and the blocks are given back when it has them."""
    for params in (LOADS, {"do_remote_decode": True}):
        problem = form_problem(params, 2, NIXL)
        assert problem is not None
        assert problem[0] == "n"
    assert form_problem({}, 2, NIXL) is None


def test_other_connectors() -> None:
    """Theirs are not known here; what is no mapping is none of theirs either."""
    assert form_problem({"remote_port": "x"}, 2, OTHER) is None
    assert form_problem({"remote_port": "x"}, 2, None) is None
    assert form_problem([1], 1, None) is not None


def test_agreement() -> None:
    """With the prompt, the model, and what is being answered."""

    def problem(**changes: Any) -> str:
        mine: dict[str, Any] = {"num_prefilled": 41, "num_groups": 2, "loading": [None, "x"]}
        return agreement_problem(LOADS, **(mine | changes)) or ""

    assert problem() == ""
    assert "remote_num_tokens is 41" in problem(num_prefilled=40)
    assert "remote_block_ids has 2 lists" in problem(num_groups=1)
    assert "remote_request_id" in problem(loading=["cmpl-1-0"])
