"""A few lines of HTTP server where ``vllm serve`` would be, for commands that start, ask and end one.

It prints its process id and that of a child, and behaves as its first argument says: see the tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_METRICS = """\
vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0
vllm_diffusion:passes_total{model_name="m"} 6.0
vllm_diffusion:denoise_steps_total{model_name="m"} 4.0
vllm_diffusion:canvases_total{model_name="m"} 1.0
vllm:diffusion_num_denoising_steps_total{model_name="m"} 5.0
"""
_DRAFT_METRICS = """\
vllm:request_success_total{finished_reason="stop",model_name="m"} 1.0
vllm:spec_decode_num_drafts_total{model_name="m"} 2.0
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 11.0
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 14.0
"""


def command(behaviour: str) -> list[str]:
    """Return its command line, which waits for a port."""
    return [sys.executable, __file__, behaviour, "{port}"]


class _Handler(BaseHTTPRequestHandler):
    behaviour = ""

    def do_GET(self) -> None:
        metrics = _DRAFT_METRICS if self.behaviour.startswith("drafts") else _METRICS
        self.reply(200, metrics if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.headers["authorization"] != "Bearer " + os.environ["VLLM_API_KEY"]:
            return self.reply(401, "{}")
        if self.behaviour == "refuses":
            return self.reply(400, json.dumps({"error": {"message": "too long"}}))
        pieces = {"empty": [], "drafts-otherwise": ["16"]}.get(self.behaviour, ["1", "5\x1b[2J"])
        chunks = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in pieces]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        chunks.append({"choices": [], "usage": {"completion_tokens": 3}})
        lines = ["data: " + json.dumps(chunk) for chunk in chunks] + ["data: [DONE]", ""]
        if self.behaviour == "breaks-off":
            self.reply(200, f"{lines[0]}\n\n", length=10_000)
            os._exit(1)
        return self.reply(200, "\n\n".join(lines))

    def reply(self, status: int, text: str, length: int | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _die() -> None:
    time.sleep(1)
    print("the last line", flush=True)
    os._exit(4)


def main(behaviour: str, port: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("pid", os.getpid(), "child", child.pid, "a line of the server's", flush=True)
    if behaviour == "dies":
        print("ValueError: no such thing", flush=True)
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
    if behaviour == "dies later":
        threading.Thread(target=_die).start()
    _Handler.behaviour = behaviour
    ThreadingHTTPServer(("127.0.0.1", int(port)), _Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:3])
