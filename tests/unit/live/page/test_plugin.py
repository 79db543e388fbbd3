"""Tests of what the page's plugin adds to a server, guarded by vLLM's middleware or ours."""

import asyncio
import hashlib
import re
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from vllm.config import MultiModalConfig

from tests.support.doubles.page_stub import engine_client
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.checkpoints import READER_TASKS, TASKS, shipped_checkpoint
from vllm_diffusion.live.page.plugin import MODEL_PATH, LiveCanvasPage, end_tokens_of
from vllm_diffusion.requests.arguments import argument_names, parse_arguments
from vllm_diffusion.requests.require_key import PAGE, PAGE_FILES, RequireKey

pytestmark = pytest.mark.engine

# lib/marked.esm.js of marked 18.2.1.
MARKED = "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
KEY = {"Authorization": "Bearer the key"}


def client(
    spec: Any = None,
    guard: Any = None,
    model: str = "someone/m",
    multimodal_config: Any = None,
    **options: Any,
) -> TestClient:
    from vllm.plugins.endpoint_plugins.interface import EndpointPlugin

    app, plugin = FastAPI(), LiveCanvasPage()
    assert isinstance(plugin, EndpointPlugin)
    plugin.attach_router(app)
    engine = engine_client(
        spec,
        model=model,
        served_model_name="m",
        architecture="A",
        max_model_len=64,
        multimodal_config=multimodal_config,
    )
    asyncio.run(plugin.init_state(engine, app.state, None))
    if guard is not None:
        app.add_middleware(guard, **options)
    return TestClient(app)


@pytest.mark.parametrize("guard", ["vllm", "ours"])
def test_key(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's files need no key, since the page requests it; the facts of the model do."""
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    monkeypatch.setenv("VLLM_API_KEY", "the key")
    spec = diffusion_gemma_spec(32)
    asked = (
        client(spec, RequireKey)
        if guard == "ours"
        else client(spec, AuthenticationMiddleware, tokens=["the key"])
    )
    for name in PAGE_FILES:
        assert asked.get(PAGE + name).status_code == 200
    assert asked.get(MODEL_PATH).status_code == 401
    assert asked.get(MODEL_PATH, headers=KEY).status_code == 200


def test_files() -> None:
    """Every file that the page names is served, with headers that exclude other sources."""
    asked = client(diffusion_gemma_spec(32))
    media_types = {"": "text/html", "css": "text/css", "js": "text/javascript"}
    named = set()
    for name in PAGE_FILES:
        response = asked.get(PAGE + name)
        media_type = media_types[name.rpartition(".")[2]]
        assert response.headers["content-type"] == f"{media_type}; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        if name == "marked.js":
            # The library as its publisher released it, from which the page uses what makes no
            # markup.
            assert hashlib.sha256(response.content).hexdigest() == MARKED
            continue
        # Nothing is fetched from elsewhere, and nothing is written as markup.
        assert "://" not in response.text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", response.text
        )
        named |= set(re.findall(r'(?:src|href|from)[= ]"(?:\./)?(\w+\.\w+)"', response.text))
    assert named == set(PAGE_FILES) - {""}


@pytest.mark.parametrize(
    "spec", [diffusion_gemma_spec(32, 16), masked_spec(4)], ids=["gemma", "masked"]
)
def test_model(spec: Any) -> None:
    """Every setting that the page names is accepted with each of its words and bounds."""
    told = client(spec).get(MODEL_PATH).json()
    assert (told["model"], told["architecture"], told["max_model_len"]) == ("m", "A", 64)
    assert told["canvas_length"] == spec.length
    names = [setting["name"] for setting in told["settings"]]
    assert set(names) <= set(argument_names(spec))
    assert {f"diffusion_{name}" for name in spec.rule_settings} <= set(names)
    assert set(told["presets"]) == set(spec.presets)
    for setting in told["settings"]:
        taken = setting.get("words") or [setting["low"], setting["high"], setting["default"]]
        for value in taken:
            parse_arguments({setting["name"]: value}, spec=spec, vocab_size=64)
    assert all(set(values) <= set(names) for values in told["presets"].values())


def test_model_defaults() -> None:
    """The default of an argument is the value that the server was started with."""
    told = client(diffusion_gemma_spec(32, 16)).get(MODEL_PATH).json()
    defaults = {setting["name"]: setting["default"] for setting in told["settings"]}
    assert defaults["diffusion_max_steps"] == 16
    assert defaults["diffusion_canvas_length"] == 32
    assert defaults["diffusion_entropy_bound"] == 0.1
    assert defaults["diffusion_preset"] is None


@pytest.mark.parametrize(
    ("options", "fact", "expected"),
    [
        # The tasks of a model are listed for a shipped checkpoint and for no other.
        ({}, "tasks", ""),
        ({"model": str(SHIPPED)}, "tasks", TASKS),
        ({"model": str(shipped_checkpoint("mineru"))}, "tasks", READER_TASKS),
        # Pictures are offered if both the model and the server's limits accept one.
        ({}, "takes_pictures", False),
        (
            {"multimodal_config": MultiModalConfig(limit_per_prompt={"image": 0})},
            "takes_pictures",
            False,
        ),
        ({"multimodal_config": MultiModalConfig()}, "takes_pictures", True),
    ],
)
def test_facts(options: dict[str, Any], fact: str, expected: Any) -> None:
    """The page learns the tasks of a checkpoint and whether pictures are taken."""
    told = client(diffusion_gemma_spec(32), **options).get(MODEL_PATH).json()
    assert told[fact] == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [((), ["<eos>", "<turn|>"]), (("<pad>", "<|im_end|>"), ["<eos>", "<pad>", "<turn|>"])],
    ids=["tokenizer", "family"],
)
def test_end_tokens(texts: tuple[str, ...], expected: list[str]) -> None:
    """The end tokens of tokenizer and ``generation_config.json`` are spelled as in frames.

    Tokens at which a family's loop ends by itself are end tokens too, if a text is one token.
    """
    spec = replace(diffusion_gemma_spec(32), end_texts=texts)
    told = client(spec).get(MODEL_PATH).json()
    assert sorted(told["end_tokens"]) == expected


def test_end_tokens_without_tokenizer() -> None:
    """A server that was started without a tokenizer has no text for end tokens."""
    assert end_tokens_of(engine_client(None).vllm_config.model_config, None) == []


def test_another_model() -> None:
    """A request for the facts of a model without canvases gets a 404 with its name."""
    response = client().get(MODEL_PATH)
    assert response.status_code == 404
    assert "m is not served by vllm-diffusion" in response.json()["detail"]
