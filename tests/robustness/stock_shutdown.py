"""SIGTERM to a server with open requests: does each of them end? Needs vLLM and Python alone.

    python tests/robustness/stock_shutdown.py MODEL [--trials N] [--requests N] [-- options of vllm serve]

Prints a line for each trial. Where there is no accelerator, ``VLLM_PLUGINS=vllm_diffusion_cpu`` serves an
ordinary model with this package's platform and nothing else of it; with one, ``VLLM_PLUGINS=`` leaves
nothing. ``docs/operate/stopping.md`` holds what was printed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

START_SECONDS, CLIENT_SECONDS, STOP_SECONDS = 600, 20, 60


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(model: str, port: int, options: list[str]) -> subprocess.Popen[bytes]:
    """Start a server and return when it answers."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        "model",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return process
        except OSError:
            time.sleep(0.5)
    process.kill()
    raise SystemExit("The server did not start.")


def ask(port: int, number: int, first: threading.Barrier, ended: dict[int, float]) -> None:
    """Open a stream, read it to its end, and note when that came; nothing if the client gives up."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CLIENT_SECONDS)
    body = {"model": "model", "prompt": f"{number}", "max_tokens": 900, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
    response = connection.getresponse()
    response.readline()
    first.wait()
    try:
        response.read()
    except TimeoutError:
        return
    except (http.client.HTTPException, OSError):
        pass
    ended[number] = time.monotonic()


def trial(model: str, num_requests: int, options: list[str]) -> str:
    """Describe how one server stopped."""
    port = free_port()
    process = start(model, port, options)
    ended: dict[int, float] = {}
    first = threading.Barrier(num_requests + 1)
    clients = [
        threading.Thread(target=ask, args=(port, i, first, ended)) for i in range(num_requests)
    ]
    for client in clients:
        client.start()
    first.wait()
    stopped = time.monotonic()
    process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join()
    try:
        process.wait(STOP_SECONDS)
        gone = f"the server after {time.monotonic() - stopped:.1f} s"
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        gone = "the server not at all"
    longest = max((at - stopped for at in ended.values()), default=0.0)
    return f"{len(ended)} of {num_requests} requests ended, the last after {longest:.1f} s; {gone}"


def main() -> None:
    arguments = sys.argv[1:]
    options: list[str] = []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, options = arguments[:place], arguments[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--requests", type=int, default=6)
    parsed = parser.parse_args(arguments)
    plugins = os.environ.get("VLLM_PLUGINS", "all")
    for number in range(1, parsed.trials + 1):
        line = trial(parsed.model, parsed.requests, options)
        print(f"{number} (plugins {plugins}): {line}", flush=True)


if __name__ == "__main__":
    main()
