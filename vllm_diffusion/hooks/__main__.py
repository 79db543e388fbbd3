"""``python -m vllm_diffusion.hooks``: what moved in the installed vLLM of what we rely on.

Exit status 1 if anything did. ``--update`` scans this package's source and writes the file anew.
"""

from __future__ import annotations

import argparse
import json
import sys

from vllm_diffusion.hooks import upstream


def signatures() -> dict[str, dict[str, object]]:
    """The content of the file, found by a scan."""
    from vllm_diffusion.hooks.scan import scan

    rows: dict[str, dict[str, object]] = {}
    for path, found in scan().items():
        row: dict[str, object] = {
            "use": found.use,
            "signature": upstream.signature_of(path),
            "files": sorted(found.files),
        }
        if found.reason:
            row |= {"reason": found.reason, "until": found.until}
        rows[path] = row
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print what moved; exit status 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m vllm_diffusion.hooks", description=__doc__)
    parser.add_argument("--update", action="store_true", help="scan and write the file anew")
    arguments = parser.parse_args(argv)
    installed = upstream.installed_version()
    if arguments.update:
        rows = signatures()
        lines = [f" {json.dumps(path)}: {json.dumps(row)}" for path, row in rows.items()]
        upstream.SIGNATURES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        print(f"wrote {len(rows)} symbols of vLLM {installed}")
        return 0
    symbols = upstream.read_symbols()
    moved = upstream.moved_symbols(symbols)
    print(f"vLLM {installed}: {len(symbols) - len(moved)} of {len(symbols)} symbols as known")
    print("\n".join(moved))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
