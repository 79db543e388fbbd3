"""Tests of frames and step maps over HTTP, as clients get them."""

import http.server
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.commands import run
from tests.support.engines.server import MODEL, Server

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
OBSERVABILITY = ROOT / "examples" / "observability"

MESSAGES = [{"role": "user", "content": "Put these words in capitals: lamp, tree, stone, river."}]


@pytest.fixture(autouse=True)
def _idle(server: Server) -> Iterator[None]:
    """Check that no test leaves a request or a KV block in use."""
    yield
    server.wait_until_idle()


class Stream:
    """The result of a client that appends deltas, by choice, and what it may skip."""

    def __init__(self, chunks: Any) -> None:
        self.text: dict[int, str] = {}
        self.reason: dict[int, str] = {}
        self.usage: Any = None
        self.frames: list[dict[str, Any]] = []
        self.step_maps: list[dict[str, Any]] = []
        for chunk in chunks:
            body = chunk.model_dump()
            shown = {"diffusion_frame": self.frames, "diffusion_step_map": self.step_maps}
            if body.get("type") in shown:
                shown[body["type"]].append(body)
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                is_chat = hasattr(choice, "delta")
                piece = (choice.delta.content or "") if is_chat else choice.text
                self.text[choice.index] = self.text.get(choice.index, "") + piece
                if choice.finish_reason:
                    self.reason[choice.index] = choice.finish_reason


def ask(server: Server, kind: str, **changes: Any) -> Stream:
    client = server.client()
    create: Any = client.chat.completions.create if kind == "chat" else client.completions.create
    prompt = {"messages": MESSAGES} if kind == "chat" else {"prompt": ["One two", "Red"]}
    request = {"model": MODEL, "max_tokens": 70, "seed": 5, "n": 2, **prompt, **changes}
    with create(**request, stream=True, stream_options={"include_usage": True}) as chunks:
        return Stream(chunks)


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_clients_see_the_same(kind: str, server: Server) -> None:
    """Frames change neither text, reasons nor usage of any choice, and belong to their choice."""
    body = {"ignore_eos": True}
    usual = ask(server, kind, extra_body=body)
    shown = ask(server, kind, extra_body={**body, "diffusing": True})
    assert not usual.frames
    assert (shown.text, shown.reason) == (usual.text, usual.reason)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(shown.usage, name) == getattr(usual.usage, name)
    assert {choice["index"] for f in shown.frames for choice in f["choices"]} == set(usual.text)
    kinds = {"chat": "chat.completion.chunk", "plain": "text_completion"}
    for index, text in usual.text.items():
        frames = [f for f in shown.frames if f["choices"][0]["index"] == index]
        assert {f["object"] for f in frames} == {kinds[kind]}
        assert {f["total"] for f in frames} == {frames[0]["total"]}
        last = {f["block"]: f["text"] for f in frames if f["is_last"]}
        assert "".join(last[block] for block in sorted(last)) == text
        assert all("token_ids" not in f and "entropy" not in f for f in frames)


def test_live_canvas_example(server: Server) -> None:
    """The example answers its own question rightly with canvases that change from step to step."""
    example = ROOT / "examples" / "live_canvas.py"
    of_server = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{server.url}/v1"}
    done = run(sys.executable, example, timeout=120, env=os.environ | of_server)
    frames = re.findall(r"^canvas (\d+), step +\d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(set(frames)) >= len({block for block, _ in frames}) + 2
    answer = "lamp: LAMP, river: RIVER, stone: STONE, cloud: CLOUD"
    assert done.stdout.endswith(f"answer: {answer}\n")


class _AskingForFrames(http.server.BaseHTTPRequestHandler):
    """Forwards a request with ``diffusing`` in its body, and returns its answer as it comes."""

    url: str
    num_frames = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body["diffusing"] = True
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with httpx.stream("POST", self.url + self.path, json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                type(self).num_frames += '"diffusion_frame"' in line
                self.wfile.write(line.encode() + b"\n")

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def test_llm_client(server: Server) -> None:
    """``llm``, which sends no fields of its own, prints the answer with and without frames."""
    from llm.default_plugins.openai_models import Chat

    handler = type("OfTest", (_AskingForFrames,), {"url": server.url})
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    said = []
    for url in (server.url, f"http://127.0.0.1:{proxy.server_port}"):
        model = Chat(MODEL, api_base=f"{url}/v1")
        question = str(MESSAGES[0]["content"])
        answer = model.prompt(question, key="none", seed=5, max_tokens=70)
        said.append(("".join(answer), answer.usage().output))
    proxy.shutdown()
    assert handler.num_frames > 3
    assert said[0] == said[1]
    assert "LAMP" in said[0][0]


def test_dashboard_and_rules(server: Server) -> None:
    """Every metric that the dashboard and the rules name is on ``/metrics`` of a running server."""
    ask(server, "chat", n=1)
    served = httpx.get(f"{server.url}/metrics", timeout=60).text
    # A metric by position has no sample before a draft was verified.
    described = re.findall(r"^# TYPE (\S+)", served, re.MULTILINE)
    names = {line.partition("{")[0].partition(" ")[0] for line in served.splitlines()}
    names |= set(described)
    dashboard = json.loads((OBSERVABILITY / "dashboard.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    rules = (OBSERVABILITY / "rules.yml").read_text(encoding="utf-8")
    asked = set(re.findall(r"vllm(?:_diffusion)?:[a-z0-9_]+", " ".join(expressions)))
    recorded = set(re.findall(r"record: (\S+)", rules))
    asked |= set(re.findall(r"vllm(?:_diffusion)?:[a-z_]+(?::[a-z0-9]+)?", rules)) - recorded
    assert len(asked) > 12
    assert asked <= names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus)")
def test_promtool() -> None:
    """Prometheus's own check accepts the rules and its configuration."""
    for kind, name in (("rules", "rules.yml"), ("config", "prometheus.yml")):
        run("promtool", "check", kind, name, cwd=OBSERVABILITY)


def slow_reader(server: Server, ended: threading.Event) -> None:
    """Request frames with every field, and read a byte per second."""
    xargs = {"diffusion_frames": 1, "diffusion_frame_fields": ["token_ids", "kept", "entropy"]}
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 200}
    data = json.dumps({**body, "ignore_eos": True, "vllm_xargs": xargs}).encode()
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80)) as connection:
        # Small, so that the server has to wait soon.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(data)).encode() + b"\r\n\r\n" + data
        )
        while not ended.wait(1.0):
            if not connection.recv(1):
                return


@pytest.mark.slow
def test_slow_readers_slow_nobody(server: Server) -> None:
    """Of 32 streams, slow and killed readers do not slow the others."""

    def watched(seed: int) -> Stream:
        return ask(server, "chat", n=1, seed=seed, extra_body={"diffusing": True})

    alone = [watched(seed) for seed in range(4)]
    ended = threading.Event()
    with ThreadPoolExecutor(32) as pool:
        slow = [pool.submit(slow_reader, server, ended) for _ in range(16)]
        killed = os.fork()
        if killed == 0:
            watched(99)
            os._exit(0)
        time.sleep(1.0)
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        others = [pool.submit(watched, seed % 4) for seed in range(15)]
        streams = [other.result(timeout=300) for other in others]
        ended.set()
        for one in slow:
            one.result(timeout=60)
    for i, stream in enumerate(streams):
        expected = alone[i % 4]
        assert (stream.text, stream.reason) == (expected.text, expected.reason)
        assert [f["step"] for f in stream.frames] == [f["step"] for f in expected.frames]
