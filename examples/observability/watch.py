"""Start Prometheus on a server of this project, with the rules beside this file.

    vllm serve "$(vllm-diffusion checkpoint)" --served-model-name tiny          # in another
    terminal python examples/observability/watch.py              # apt-get install prometheus

Prometheus answers on http://127.0.0.1:9090 until Ctrl-C, and keeps its data in a folder of its own
that is removed then. dashboard.json is for Grafana (Dashboards, New, Import), which asks for the
Prometheus to use.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--server", default="127.0.0.1:8000", help="host and port (%(default)s)")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus (%(default)s)")
    arguments = parser.parse_args()
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        print("Prometheus is not here: apt-get install prometheus.", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vllm-diffusion-prometheus-") as folder:
        config = (HERE / "prometheus.yml").read_text(encoding="utf-8")
        config = config.replace("127.0.0.1:8000", arguments.server)
        (Path(folder) / "prometheus.yml").write_text(config, encoding="utf-8")
        shutil.copy(HERE / "rules.yml", folder)
        print(f"http://127.0.0.1:{arguments.port} watches {arguments.server}; Ctrl-C ends it.")
        try:
            return subprocess.run(
                [
                    prometheus,
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{arguments.port}",
                    "--log.level=warn",
                ],
                check=False,
            ).returncode
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
