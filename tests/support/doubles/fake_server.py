"""A few lines of HTTP server where ``vllm serve`` would be, for commands that start, ask and
measure servers.

It prints its process id and that of a child, asks for the key of its environment, and counts what
it has answered. Behaviours:

- ``good``: canvases. ``plain``: no draft.
- ``drafts``, ``worse``, ``drafts-otherwise``: a draft that is kept, that is not kept, that changes
  answers.
- ``verifies``, ``verifies-otherwise``: counts as this package's own drafts do; the latter changes
  answers.
- ``empty``: says nothing. ``refuses``: every request. ``breaks``: those after the third.
  ``breaks-off``: ends in mid-answer. ``hangs``: says nothing more there.
- ``dies``: at once. ``dies later``: a second after it was found ready. ``never-ready``: does not
  answer. ``stubborn``: takes no signal. ``stays``: has no child.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# What each answer adds to counters. The prompts have seven tokens and the answers ten.
_ANSWER = {
    'vllm:request_success_total{finished_reason="stop"}': 1,
    "vllm:generation_tokens_total": 10,
    "vllm:prompt_tokens_total": 7,
    "vllm:time_to_first_token_seconds_sum": 0.25,
}
_CANVASES = {
    "vllm_diffusion:passes_total": 6,
    "vllm_diffusion:denoise_steps_total": 4,
    "vllm_diffusion:canvases_total": 1,
    "vllm:diffusion_num_denoising_steps_total": 5,
}
_VERIFICATIONS = {
    "vllm_diffusion:passes_total": 5,
    "vllm_diffusion:encode_rows_total": 15,
    "vllm_diffusion:canvas_rows_total": 8,
    "vllm_diffusion:verifications_total": 2,
    'vllm_diffusion:kept_tokens_per_position_total{position="0"}': 2,
    'vllm_diffusion:kept_tokens_per_position_total{position="1"}': 1,
}


def _drafts(*kept: int) -> dict[str, int]:
    """Return two drafts of four tokens each, and how many were kept at each position."""
    name = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'
    return {name % position: count for position, count in enumerate(kept)} | {
        "vllm:spec_decode_num_drafts_total": 2,
        "vllm:spec_decode_num_draft_tokens_total": 8,
        "vllm:spec_decode_num_accepted_tokens_total": sum(kept),
    }


_COUNTERS: dict[str, dict[str, int]] = {
    "good": _CANVASES,
    "drafts": _drafts(2, 2, 2, 1),
    "worse": _drafts(0, 0, 0, 0),
    "verifies": _VERIFICATIONS,
    "verifies-otherwise": _VERIFICATIONS,
}


def command(behaviour: str, port: str = "{port}") -> list[str]:
    """Return the server's command line, which lacks a port."""
    return [sys.executable, __file__, behaviour, port]


def asked(behaviour: str) -> list[dict[str, Any]]:
    """Return the bodies of the requests so far, from the file that the server wrote."""
    found: list[dict[str, Any]] = json.loads(Path(f"asked-{behaviour}").read_text())
    return found


class _Handler(BaseHTTPRequestHandler):
    behaviour = ""
    lock = threading.Lock()
    requests: list[dict[str, Any]] = []
    num_answered = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "served"}]})
        else:
            self.reply(200, self.metrics() if self.path == "/metrics" else "")
        if self.behaviour == "dies later":
            threading.Timer(1.0, _die).start()

    def metrics(self) -> str:
        counters = _ANSWER | _COUNTERS.get(self.behaviour, {})
        return "".join(f"{name} {n * self.num_answered}\n" for name, n in counters.items())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            return self.reply(401, {"error": "Unauthorized"})
        with self.lock:
            self.requests.append(body)
            Path(f"asked-{self.behaviour}").write_text(json.dumps(self.requests))
            allowed = {"refuses": 0, "breaks": 3}.get(self.behaviour, len(self.requests))
            if len(self.requests) > allowed:
                return self.reply(400, {"error": {"message": "too long"}})
            _Handler.num_answered += 1
        is_other = self.behaviour.endswith("-otherwise")
        if body.get("stream"):
            said = ["16" if is_other else "15", "\x1b[2J"]
            return self.stream([] if self.behaviour == "empty" else said)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "text": "x"}
        choice["token_ids"] = [1] * 9 + [3 if is_other else 2]
        choice["message"] = {"role": "assistant", "content": "said"}
        return self.reply(200, {"id": "a", "created": 0, "model": "m", "choices": [choice]})

    def stream(self, pieces: list[str]) -> None:
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces
        ]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        if self.behaviour in ("breaks-off", "hangs"):
            self.reply(200, events[0], length=10_000)
            time.sleep(600 if self.behaviour == "hangs" else 0)
            os._exit(1)
        self.reply(200, "".join(events))

    def reply(self, status: int, content: Any, length: int | None = None) -> None:
        is_text = isinstance(content, str)
        body = (content if is_text else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream" if is_text else "application/json")
        self.send_header("content-length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _die() -> None:
    print("the last line", flush=True)
    os._exit(4)


def main(behaviour: str, port: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("pid", os.getpid(), "child", child.pid, "a line of the server's", flush=True)
    if behaviour == "dies":
        print("(EngineCore pid=7) RuntimeError: first", flush=True)
        print("ValueError: behind it", flush=True)
        sys.exit(3)
    if behaviour == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "stays":
        # Its parent may be killed, and end nothing but this process.
        child.kill()
    if behaviour == "never-ready":
        print("Resolved architecture: Fake", flush=True)
        time.sleep(600)
    _Handler.behaviour = behaviour
    ThreadingHTTPServer(("127.0.0.1", int(port)), _Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:3])
