"""Ask a server for one token: exit status 0 if its engine computes, 1 if it stands still.

    python3 alive.py --url http://127.0.0.1:8000 --seconds 20

vLLM's /health answers 200 while an engine hangs. A request alone would fail on a server that is
merely busy, where it waits for its turn, so the engine also counts as alive while the counters of
its passes and tokens grow.

The key is in VLLM_API_KEY, if the server has one. This file needs Python alone.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.request

# What an engine adds to while it computes: the first for diffusion models, the others for all.
_COUNTERS = (
    "vllm_diffusion:passes_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
_POLL_SECONDS = 1.0
# The server is on this machine, so no proxy of the environment is asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (%(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="time in which something must happen (%(default)s)",
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    outcome: list[str] = []
    try:
        before = computed(arguments.url, arguments.seconds)
        threading.Thread(
            target=ask, args=(arguments.url, arguments.seconds, outcome), daemon=True
        ).start()
        while (left := deadline - time.monotonic()) > 0:
            if outcome == ["answered"]:
                return 0
            time.sleep(min(_POLL_SECONDS, left))
            if computed(arguments.url, max(left, _POLL_SECONDS)) > before:
                return 0
    except OSError as error:
        outcome.append(f"{arguments.url}/metrics: {error}")
    print(
        f"The engine computed nothing in {arguments.seconds:g} s; {' '.join(outcome) or 'no answer'}"
    )
    return 1


def computed(url: str, seconds: float) -> float:
    """Return the sum of the counters that grow while the server's engine computes."""
    with _OPENER.open(f"{url}/metrics", timeout=seconds) as response:
        text = response.read().decode()
    samples = re.findall(r"^([\w:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for name, value in samples if name in _COUNTERS)


def ask(url: str, seconds: float, outcome: list[str]) -> None:
    """Ask for one token, and append what came: ``"answered"``, or why nothing did."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    try:
        with _OPENER.open(request, timeout=seconds) as response:
            response.read()
        outcome.append("answered")
    except urllib.error.HTTPError as error:
        outcome.append(f"/v1/completions: {error.code} {error.read(300).decode(errors='replace')}")
    except OSError as error:
        outcome.append(f"/v1/completions: {error}")


if __name__ == "__main__":
    sys.exit(main())
