"""Tests of LoRA adapters over HTTP: loaded and unloaded while serving, and bad ones refused."""

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.server import MODEL, Server, start_server
from tests.support.models.adapters import DECODER, ENCODER, adapt, put_into_hub_cache
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT = {
    "messages": [{"role": "user", "content": "What is 7+8?"}],
    "max_tokens": 40,
    "seed": 3,
    "ignore_eos": True,
    "return_token_ids": True,
    "vllm_xargs": {"diffusion_max_steps": 6},
}
# SDAR's modules are named as the stack that encoder and decoder share, and are of other sizes.
MISFIT = "it must be F32 or F16 or BF16 [4, 128]; serve it with the model that it was trained on"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of adapters, one of which does not fit this model."""
    from transformers import DiffusionGemmaForBlockDiffusion

    from tests.support.families.makers import sdar

    folder = tmp_path_factory.mktemp("adapters")
    for i, (name, targets) in enumerate({"one": f"{ENCODER}|{DECODER}", "two": DECODER}.items()):
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(SHIPPED)
        adapt(model, folder / name, seed=i, size=1.0, target_modules=targets)
    adapt(sdar().body, folder / "other model", target_modules=r".*self_attn\.q_proj")
    return {name: folder / name for name in ("one", "two", "other model")}


@pytest.fixture(scope="module")
def adapted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cache = tmp_path_factory.mktemp("hub")
    for repository, name in (("someone/two", "two"), ("someone/misfit", "other model")):
        put_into_hub_cache(cache, repository, folders[name])
    in_hub = {"name": "in hub", "path": "someone/two", "base_model_name": MODEL}
    with start_server(
        SHIPPED,
        tmp_path_factory.mktemp("adapted") / "server.log",
        *("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8"),
        *("--lora-modules", f"one={folders['one']}", json.dumps(in_hub)),
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        HF_HUB_CACHE=str(cache),
        HF_HUB_OFFLINE="1",
    ) as running:
        yield running


def ask(server: Server, model: str, engine: str = "", **changes: Any) -> httpx.Response:
    """Send the prompt with changes, to an engine if there are several."""
    headers = {"X-data-parallel-rank": engine} if engine else {}
    return server.post("/v1/chat/completions", PROMPT | {"model": model} | changes, **headers)


def tokens(server: Server, model: str, engine: str = "", **changes: Any) -> tuple[int, ...]:
    response = ask(server, model, engine, **changes)
    assert response.status_code == 200, response.text
    return tuple(response.json()["choices"][0]["token_ids"])


def load(server: Server, name: str, path: Path) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path)}
    return httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=60)


def unload(server: Server, name: str) -> httpx.Response:
    body = {"lora_name": name}
    return httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body, timeout=60)


def test_loaded_and_unloaded(server: Server, adapted: Server, folders: dict[str, Path]) -> None:
    """Loading and unloading an adapter changes no answer of running requests."""
    names = [MODEL, "one"]
    before = [tokens(adapted, name) for name in names]
    assert before[0] == tokens(server, MODEL)
    assert before[0] != before[1]
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(tokens, adapted, name, seed=3, max_tokens=200)
            for name in names
            for _ in "ab"
        ]
        assert load(adapted, "two", folders["two"]).status_code == 200
        found = [pool.submit(tokens, adapted, name) for name in (*names, "two") for _ in "ab"]
        answers = [one.result() for one in found]
        long = [one.result() for one in running]
    assert answers[:4] == [before[0]] * 2 + [before[1]] * 2
    assert answers[4] == answers[5]
    assert answers[4] not in before
    assert [len(set(long[:2])), len(set(long[2:]))] == [1, 1]
    metrics = httpx.get(f"{adapted.url}/metrics", timeout=60).text
    assert re.search(r'vllm:lora_requests_info\{max_lora="2",[^}]*running_lora_adapters="', metrics)
    models = httpx.get(f"{adapted.url}/v1/models", timeout=60).json()["data"]
    assert {model["id"] for model in models} == {*names, "two", "in hub"}
    assert unload(adapted, "two").status_code == 200
    assert ask(adapted, "two").status_code == 404
    assert [tokens(adapted, name) for name in names] == before


def test_repositories(adapted: Server, folders: dict[str, Path]) -> None:
    """Repositories load from the command line and while serving; an unfetched one is reported."""
    assert load(adapted, "two", folders["two"]).status_code == 200
    assert load(adapted, "fetched", Path("someone/two")).status_code == 200
    answers = {tokens(adapted, name) for name in ("two", "in hub", "fetched")}
    assert len(answers) == 1
    assert answers != {tokens(adapted, MODEL)}
    models = httpx.get(f"{adapted.url}/v1/models", timeout=60).json()["data"]
    (card,) = (model for model in models if model["id"] == "in hub")
    assert (card["root"], card["parent"]) == ("someone/two", MODEL)
    for name in ("two", "fetched"):
        assert unload(adapted, name).status_code == 200
    for path, sentence in (
        ("someone/misfit", MISFIT),
        ("someone/nothing", "no repository of this name could be fetched"),
    ):
        response = load(adapted, "bad", Path(path))
        assert response.status_code == 400, response.text
        assert sentence in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "lora_path"
    assert ask(adapted, "bad").status_code == 404
    adapted.assert_alive()


TWO_ENGINES = ("--data-parallel-size", "2", "--distributed-executor-backend", "uni")
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")


def check_engines(
    replicas: Server, expected: dict[str, list[tuple[int, ...]]], seeds: range
) -> None:
    """Check each engine's answers, one next to an idle engine and all at once."""
    for engine in "01":
        for name, answers in expected.items():
            assert tokens(replicas, name, engine, seed=seeds[0]) == answers[0], (engine, name)
    with ThreadPoolExecutor(16) as pool:
        found = {
            (engine, name): [
                pool.submit(tokens, replicas, name, engine, seed=seed) for seed in seeds
            ]
            for engine in "01"
            for name in expected
        }
    for (engine, name), answers in found.items():
        assert [answer.result() for answer in answers] == expected[name], (engine, name)
    replicas.wait_until_idle()


def test_engines_that_share_experts(
    adapted: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Two engines after two API servers each have the adapters of the command line."""
    assert load(adapted, "two", folders["two"]).status_code == 200
    seeds = range(2)
    expected = {
        name: [tokens(adapted, name, seed=seed) for seed in seeds] for name in (MODEL, "one", "two")
    }
    assert unload(adapted, "two").status_code == 200
    modules = [f"{name}={folders[name]}" for name in ("one", "two")]
    with start_server(
        SHIPPED, tmp_path / "server.log", *TWO_ENGINES, *LORA, "--lora-modules", *modules
    ) as running:
        check_engines(running, expected, seeds)


def test_engines_of_a_dense_model(tmp_path: Path) -> None:
    """Two engines after one API server both load an adapter while they serve."""
    from transformers import Qwen3ForCausalLM

    sdar = shipped_checkpoint("sdar")
    model = Qwen3ForCausalLM.from_pretrained(sdar)
    adapt(model, tmp_path / "one", size=1.0, target_modules=r".*\.(self_attn|mlp)\..*_proj")
    names, seeds, expected = (MODEL, "one"), range(2), {}
    for kind, options in (("one", ()), ("two", (*TWO_ENGINES, "--api-server-count", "1"))):
        with start_server(
            sdar,
            tmp_path / f"{kind}.log",
            *options,
            *LORA,
            VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        ) as running:
            assert load(running, "one", tmp_path / "one").status_code == 200
            if kind == "one":
                for name in names:
                    expected[name] = [tokens(running, name, seed=seed) for seed in seeds]
                assert expected[MODEL] != expected["one"]
            else:
                check_engines(running, expected, seeds)


def test_taken_away(adapted: Server, folders: dict[str, Path], tmp_path: Path) -> None:
    """An adapter that was evicted and whose files are gone has its requests refused."""
    copies = []
    for i in range(4):
        copies.append(shutil.copytree(folders["two"], tmp_path / str(i)))
        assert load(adapted, f"copy{i}", copies[-1]).status_code == 200
    answer = tokens(adapted, "copy0")
    assert [tokens(adapted, f"copy{i}") for i in range(4)] == [answer] * 4
    shutil.rmtree(copies[0])
    response = ask(adapted, "copy0")
    assert response.status_code == 400
    assert "there is no such folder" in response.json()["error"]["message"]
    assert tokens(adapted, "copy1") == answer
    for i in range(4):
        assert unload(adapted, f"copy{i}").status_code == 200
    adapted.wait_until_idle()
    adapted.assert_alive()
