#!/bin/sh
# Join the parts of stage_host.py on an offline GPU host, and unpack them into a folder.
#
#     sh install_host.sh PARTS SITE && . SITE/env.sh
#
# Ends with status 1 if a part is damaged or missing, and with 2 if something that is staged cannot be imported.
set -eu
parts=$(cd "$1" && pwd)
mkdir -p "$2"
site=$(cd "$2" && pwd)
(cd "$parts" && sha256sum -c --quiet SHA256SUMS) || exit 1
cat "$parts"/part-* | tar -xJf - -C "$site"
# A .pth file of the CuTe DSL adds this folder where packages are installed; in a folder on PYTHONPATH none is read.
path=$site
[ -d "$site/nvidia_cutlass_dsl/dsl_packages" ] && path="$site:$site/nvidia_cutlass_dsl/dsl_packages"
cat > "$site/env.sh" <<EOF
export PYTHONPATH="$path\${PYTHONPATH:+:\$PYTHONPATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
EOF
. "$site/env.sh"
python3 - "$site" <<'EOF'
import importlib
import sys
from pathlib import Path

wrong = False
for name in ("vllm", "cutlass.cute", "quack", "humming", "lmformatenforcer", "jsonschema"):
    if not (Path(sys.argv[1]) / name.partition(".")[0]).exists() and name != "cutlass.cute":
        print(f"not staged  {name}")
        continue
    try:
        importlib.import_module(name)
        print(f"imports     {name}")
    except Exception as error:
        wrong = True
        print(f"FAILS       {name}: {error!r}")
sys.exit(2 * wrong)
EOF
