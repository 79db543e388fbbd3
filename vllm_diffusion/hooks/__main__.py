"""``python -m vllm_diffusion.hooks``: what moved in the installed vLLM of what we rely on."""

import sys

from vllm_diffusion.hooks import upstream


def main() -> int:
    """Print what moved; exit status 1 if anything did."""
    symbols = upstream.read_symbols()
    moved = upstream.moved_symbols(symbols)
    known = f"{len(symbols) - len(moved)} of {len(symbols)} symbols as known"
    print(f"vLLM {upstream.installed_version()}: {known}")
    print("\n".join(moved))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
