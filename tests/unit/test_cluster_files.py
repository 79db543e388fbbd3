"""The container, Kubernetes and small-GPU files agree with vLLM, Kubernetes and this package.

No cluster runs here, so what only other projects' charts and controllers know is not checked.
"""

import itertools
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.robustness.serve_options import serve_parser
from tests.support.engines.commands import run
from vllm_diffusion.hooks.upstream import SUPPORTED

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")
FOLDER = ROOT / "examples/kubernetes"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SERVICES = yaml.safe_load((ROOT / "examples/compose/compose.yaml").read_text("utf-8"))["services"]


def _required(package: str) -> set[str]:
    """Return ``package`` and every package that it requires."""
    found: set[str] = set()
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue
        requirements = map(Requirement, lines)
        waiting += [
            canonicalize_name(requirement.name)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    return found


def test_image_has_our_dependencies() -> None:
    """The image is vLLM's, and installs only this package."""
    dependencies = PYPROJECT["project"]["dependencies"]
    ours = {canonicalize_name(Requirement(line).name) for line in dependencies}
    assert ours <= _required("vllm")
    assert "--no-deps" in CONTAINERFILE


def test_image_copies_the_package() -> None:
    """The image is of the supported vLLM and copies every source that a wheel needs."""
    (base,) = re.findall(r"^FROM (\S+)$", CONTAINERFILE, re.MULTILINE)
    assert base == f"vllm/vllm-openai:v{SUPPORTED}.0"
    sources = re.findall(r"^COPY (.+) /\S+$", CONTAINERFILE, re.MULTILINE)
    copied = {name for line in sources for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert copied >= {"pyproject.toml", "README.md", *wheel["packages"]}


def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def _production_stack() -> list[str]:
    """Return the command that the chart's template makes of its values."""
    (model,) = _read("production-stack.yaml")["servingEngineSpec"]["modelSpec"]
    names = {"maxModelLen": "--max-model-len", "maxNumSeqs": "--max-num-seqs"}
    config = model["vllmConfig"]
    assert {*config} == {*names, "enablePrefixCaching", "extraArgs"}
    options = [word for key, name in names.items() for word in (name, str(config[key]))]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", model["toolCallParser"]]
    return [model["modelURL"], *options, *config["extraArgs"]]


def _llm_d() -> list[str]:
    values = _read("llm-d.yaml")
    (container,) = values["decode"]["containers"]
    return [values["modelArtifacts"]["name"], *container["args"]]


def _kserve() -> list[str]:
    (container,) = _read("kserve.yaml")["spec"]["predictor"]["containers"]
    assert container["command"] == ["vllm", "serve"]
    return container["args"]


def _compose() -> list[str]:
    return SERVICES["server"]["command"]


@pytest.mark.engine
@pytest.mark.parametrize("arguments", [_production_stack, _llm_d, _kserve, _compose])
def test_commands_are_understood(arguments: Any) -> None:
    """vLLM's parser accepts the commands, which start the server that the README starts."""
    parsed = serve_parser().parse_args(arguments())
    assert parsed.reasoning_parser == parsed.tool_call_parser == "gemma4"
    assert (parsed.max_model_len, parsed.max_num_seqs) == (32768, 32)
    assert parsed.enable_auto_tool_choice
    # Kubernetes ends a pod after 30 s, unless its specification sets another time.
    assert 0 < parsed.shutdown_timeout <= 20
    assert parsed.model_tag in (ROOT / "README.md").read_text(encoding="utf-8")


def test_pods() -> None:
    """The parts that are Kubernetes' own satisfy its schema."""
    (container,) = _read("llm-d.yaml")["decode"]["containers"]
    # The chart's own words.
    for name in ("modelCommand", "mountModelVolume"):
        del container[name]
    container |= container.pop("extraConfig")
    predictor = _read("kserve.yaml")["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] >= 30
    for name in ("minReplicas", "maxReplicas"):
        del predictor[name]
    engine = _read("production-stack.yaml")["servingEngineSpec"]
    # The chart has the request of /health, which the start keeps.
    engine["startupProbe"]["httpGet"] = {"path": "/health", "port": 8000}
    probes = {name: engine[name] for name in ("startupProbe", "livenessProbe")}
    stack = {"containers": [{"name": "vllm", "image": "vllm-diffusion:0.33", **probes}]}
    for spec in ({"containers": [container]}, predictor, stack):
        # A server must be started again after any end; a pod does so by default.
        assert spec.get("restartPolicy", "Always") == "Always"
        _check_probes(spec["containers"][0])
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def _check_probes(container: dict[str, Any]) -> None:
    """Check that a probe is in the image, uses the start's port, and ends before its limit."""
    start, alive = container["startupProbe"], container["livenessProbe"]
    python, script, url, seconds = alive["exec"]["command"]
    assert python == "python3"
    assert f"COPY examples/kubernetes/alive.py {script}" in CONTAINERFILE
    assert url == f"--url=http://127.0.0.1:{start['httpGet']['port']}"
    assert float(seconds.removeprefix("--seconds=")) + 5 <= alive["timeoutSeconds"]
    # An engine may take long over one pass, and a start does.
    assert alive["failureThreshold"] * alive["periodSeconds"] >= 60
    assert start["failureThreshold"] * start["periodSeconds"] >= 600


def test_composed_services() -> None:
    """Open WebUI waits for the image's health check, and sends the server's key."""
    server, webui = SERVICES["server"], SERVICES["webui"]
    assert webui["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "HEALTHCHECK" in CONTAINERFILE
    assert webui["environment"]["OPENAI_API_BASE_URL"] == "http://server:8000/v1"
    assert "VLLM_API_KEY" in server["environment"]
    assert "VLLM_API_KEY" in webui["environment"]["OPENAI_API_KEY"]
    # Longer than the server's own limit.
    assert int(server["stop_grace_period"].removesuffix("s")) > 20
    assert "models:" + server["environment"]["HF_HOME"] in server["volumes"]


def test_image_says_which_release_it_is() -> None:
    """The labels have the version of the package and the name of the base image."""
    assert f'image.version="{PYPROJECT["project"]["version"]}"' in CONTAINERFILE
    assert f'base.name="vllm/vllm-openai:v{SUPPORTED}.0"' in CONTAINERFILE


@pytest.mark.engine
@pytest.mark.parametrize(
    "file", sorted((ROOT / "examples/small-gpus").glob("*.yaml")), ids=lambda file: file.stem
)
def test_small_gpu_files_are_understood(file):
    """vLLM's parser accepts the files, with a checkpoint and parsers of the documentation."""
    parsed = serve_parser().parse_args(["--config", str(file)])
    assert f"vllm serve {parsed.model} " in (ROOT / "docs/use/serving.md").read_text("utf-8")
    assert parsed.reasoning_parser == parsed.tool_call_parser == "gemma4"
    assert parsed.enable_auto_tool_choice
    assert parsed.limit_mm_per_prompt == {"image": 0, "video": 0}
    # Else vLLM's own number for the GPU counts, which differs between ways to start.
    assert parsed.max_num_batched_tokens == 2048
    assert str(file.relative_to(ROOT)) in file.read_text("utf-8")


@contextmanager
def stand_in(*, answers: int | None, passes: Iterator[int]) -> Iterator[str]:
    """Serve a counter of passes, and a status for requests; ``None`` leaves them waiting."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f'vllm_diffusion:passes_total{{engine="0",model_name="a b"}} {next(passes)}.0\n'
            self._send(200, "# TYPE vllm_diffusion:passes_total counter\n" + text)

        def do_POST(self) -> None:
            if answers is None:
                ended.wait(60)
            elif self.headers["Authorization"] != "Bearer the key":
                self._send(401, "Unauthorized")
            else:
                self._send(answers, "{}")

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def probe(url: str, key: str = "the key") -> tuple[int, str]:
    """Return the exit status of the probe and its output."""
    # A proxy that nobody is: it must not be asked.
    variables = {"VLLM_API_KEY": key, "http_proxy": "http://127.0.0.1:9"}
    command = (sys.executable, FOLDER / "alive.py", "--url", url, "--seconds", "3")
    ended = run(*command, status=None, env=variables, timeout=60)
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("answers", "passes", "status"),
    [
        (200, itertools.repeat(5), 0),
        (None, itertools.count(5), 0),
        (503, itertools.count(5), 0),
        (None, itertools.repeat(5), 1),
        (500, itertools.repeat(5), 1),
    ],
    ids=["idle", "busy", "full queue", "stands still", "broken"],
)
def test_probe(answers: int | None, passes: Iterator[int], status: int) -> None:
    """The probe succeeds if the engine answers or computes, and else fails in time."""
    with stand_in(answers=answers, passes=passes) as url:
        assert probe(url)[0] == status


def test_probe_says_why() -> None:
    """The probe's output names a wrong key, and a server that is not there."""
    with stand_in(answers=200, passes=itertools.repeat(5)) as url:
        status, text = probe(url, key="another")
        assert (status, "401" in text) == (1, True)
    status, text = probe(url)
    assert (status, "/metrics" in text) == (1, True)
