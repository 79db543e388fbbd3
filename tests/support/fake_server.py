"""A few lines of HTTP server where ``vllm serve`` would be, for commands that measure servers.

Every answer has ten tokens; a server that drafts has kept seven of eight drafted ones. Behaviours:

- ``plain``: no draft.
- ``drafts``, ``worse``, ``drafts-otherwise``: a draft that is kept, that is not kept, that changes answers.
- ``verifies``, ``verifies-otherwise``: counts as this package's own drafts do; the latter changes answers.
- ``breaks``: refuses requests after the third. ``dies``: never answers.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_KEPT = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"} %d'

_KEPT_OF_CANVAS = 'vllm_diffusion:kept_tokens_per_position_total{position="%d"} %d'


def command(behaviour: str) -> list[str]:
    """Return its command line, which waits for a port."""
    return [sys.executable, __file__, behaviour, "{port}"]


def asked(behaviour: str) -> list[dict[str, Any]]:
    """Return the bodies of the requests so far, each with its ``key``; the server wrote them here."""
    found: list[dict[str, Any]] = json.loads(Path(f"asked-{behaviour}").read_text())
    return found


class _Handler(BaseHTTPRequestHandler):
    behaviour = ""
    lock = threading.Lock()
    requests: list[dict[str, Any]] = []
    num_answered = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"object": "list", "data": [{"id": "served"}]}))
        else:
            self.reply(200, self.metrics() if self.path == "/metrics" else "")

    def metrics(self) -> str:
        n = _Handler.num_answered
        lines = [
            f'vllm:request_success_total{{finished_reason="stop"}} {n}',
            'vllm:request_success_total{finished_reason="length"} 0',
            f"vllm:generation_tokens_total {10 * n}",
            f"vllm:time_to_first_token_seconds_sum {0.25 * n}",
        ]
        if self.behaviour in ("drafts", "worse"):
            kept = (2, 2, 2, 1) if self.behaviour == "drafts" else (0, 0, 0, 0)
            lines.append(f"vllm:spec_decode_num_drafts_total {2 * n}")
            lines += [_KEPT % (position, n * count) for position, count in enumerate(kept)]
        if self.behaviour.startswith("verifies"):
            # Prompts of seven tokens, and of each answer two drafts, in five passes over 23 rows.
            counts = {"passes": 5, "encode_rows": 15, "canvas_rows": 8, "verifications": 2}
            lines += [f"vllm_diffusion:{name}_total {count * n}" for name, count in counts.items()]
            lines.append(f"vllm:prompt_tokens_total {7 * n}")
            lines += [_KEPT_OF_CANVAS % (position, n * (2, 1)[position]) for position in (0, 1)]
        return "\n".join(lines) + "\n"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.lock:
            self.requests.append(body | {"key": self.headers["authorization"]})
            Path(f"asked-{self.behaviour}").write_text(json.dumps(self.requests))
            if self.behaviour == "breaks" and len(self.requests) > 3:
                self.reply(400, json.dumps({"error": {"message": "too long"}}))
                return
            _Handler.num_answered += 1
        tokens = [1] * 9 + [3 if self.behaviour.endswith("-otherwise") else 2]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens, "text": "x"}
        choice["message"] = {"role": "assistant", "content": "said"}
        self.reply(200, json.dumps({"id": "a", "created": 0, "model": "m", "choices": [choice]}))

    def reply(self, status: int, content: str) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content.encode())))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def main(behaviour: str, port: str) -> None:
    if behaviour == "dies":
        print("(EngineCore pid=7) RuntimeError: first", flush=True)
        print("ValueError: behind it", flush=True)
        sys.exit(3)
    _Handler.behaviour = behaviour
    ThreadingHTTPServer(("127.0.0.1", int(port)), _Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
