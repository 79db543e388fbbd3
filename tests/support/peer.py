"""Run vLLM's own tests with this package and without it, and print each whose outcome differs.

    python -m tests.support.peer                  # all groups of peer.toml
    python -m tests.support.peer --only parsers   # groups whose names hold this

The tests come with vLLM's source distribution, of the version that is installed; pip fetches it by
its name. "Without" is our CPU platform alone, which vLLM needs where no accelerator works. Models
have a configuration here and the shipped tokenizer, but no weights: what needs more fails on both
sides, and says nothing. Distribution, tests and logs are kept in ``.pytest_cache/peer``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from packaging.version import Version

from tests.support.models.checkpoints import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".pytest_cache" / "peer"
LIST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# Entry points that vLLM loads, by name; an empty text is all of them.
# Tests of vLLM's bring my_plugin.
SIDES = {"without": "vllm_diffusion_cpu,my_plugin", "with": ""}
_COMMIT = "0" * 40
# Files of the shipped checkpoint, instead of those of a model that tests name.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
# vLLM's fixtures collect garbage after each test, for most of its time; a marker of theirs turns
# that off.
_PLUGIN = """\
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker("skip_global_cleanup")
"""
# pip asks a distribution for its metadata before it keeps it, and vLLM's build needs Rust to say
# it.
_BACK_END = """\
from pathlib import Path

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder, "vllm-{version}.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
    return info.name
"""


def fetch_tests(release: str) -> Path:
    """Return the folder that holds ``tests`` of a release of vLLM; fetch them the first time."""
    folder = FOLDER / release
    if (folder / "tests").is_dir():
        return folder
    site = folder / "site"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    # What vLLM's tests import, and this package's do not.
    install = [*pip, "install", "--no-deps", "--upgrade", "--target", str(site)]
    subprocess.run([*install, "pytest-asyncio", "tblib"], check=True)
    (site / "peer_plugin.py").write_text(_PLUGIN)
    with tempfile.TemporaryDirectory() as work:
        back_end = Path(work, "setuptools")
        back_end.mkdir()
        (back_end / "__init__.py").touch()
        (back_end / "build_meta.py").write_text(_BACK_END.format(version=release))
        download = [*pip, "download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
        download += ["--dest", work, f"vllm=={release}"]
        subprocess.run(download, env=os.environ | {"PYTHONPATH": work}, check=True)
        with tarfile.open(next(Path(work).glob("vllm-*.tar.gz"))) as distribution:
            distribution.extractall(work, filter="data")
        # Without its package, which would be imported instead of the installed one.
        for name in ("pyproject.toml", "tests"):
            shutil.move(Path(work, f"vllm-{release}", name), folder)
    return folder


def write_models(hub: Path) -> None:
    """Write the models of the list where a hub that is offline looks for them."""
    for entry in LIST["models"]:
        for name in entry["names"]:
            model = hub / f"models--{name.replace('/', '--')}"
            snapshot = model / "snapshots" / _COMMIT
            snapshot.mkdir(parents=True, exist_ok=True)
            (model / "refs").mkdir(exist_ok=True)
            (model / "refs" / "main").write_text(_COMMIT)
            (snapshot / "config.json").write_text(json.dumps(entry["config"]))
            for file in _TOKENIZER:
                shutil.copy(SHIPPED / file, snapshot)


def run_group(folder: Path, group: str, files: list[str], side: str) -> dict[str, str]:
    """Run a group's files in one process, and return each test's outcome by its name."""
    report = folder / f"{group}-{side}.xml"
    report.unlink(missing_ok=True)
    paths = os.pathsep.join(map(str, (folder, folder / "site", ROOT)))
    environment = os.environ | {"PYTHONPATH": paths}
    environment |= {"HF_HUB_CACHE": str(FOLDER / "hub"), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": SIDES[side]}
    if not SIDES[side]:
        del environment["VLLM_PLUGINS"]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "peer_plugin"]
    command += ["--timeout=60", f"--junitxml={report}", *files]
    command.append("--continue-on-collection-errors")
    with report.with_suffix(".log").open("wb") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if not report.is_file():
        raise SystemExit(f"pytest ended early; {report.with_suffix('.log')} has why.")
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def main(argv: list[str] | None = None) -> int:
    """Exit with 1 if the outcome of any test differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.peer")
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose names hold this")
    only = parser.parse_args(argv).only
    folder = fetch_tests(Version(version("vllm")).public)
    write_models(FOLDER / "hub")
    left_out = {file for name in LIST["left_out"] for file in (folder / "tests").glob(name)}
    num_different = 0
    for group in (group for group in LIST["groups"] if only in group):
        files = []
        for pattern in LIST["groups"][group]:
            named = sorted(set((folder / "tests").glob(pattern)) - left_out)
            files += map(str, named or sys.exit(f"no tests/{pattern} in this vLLM; mend peer.toml"))
        without, ours = (run_group(folder, group, files, side) for side in SIDES)
        different = [name for name in without | ours if without.get(name) != ours.get(name)]
        different = [name for name in different if not name.startswith(tuple(LIST["stand_ins"]))]
        for name in different:
            print(f"{name}: {without.get(name)} without, {ours.get(name)} with the package")
        print(f"{group}: {len(different)} differ; {dict(Counter(ours.values()))}", flush=True)
        num_different += len(different)
    return bool(num_different)


if __name__ == "__main__":
    sys.exit(main())
