"""Send every pair of fields to a running server: ``python -m tests.pairs URL --canvas 32``."""

import argparse

from tests.pairs.rows import Pairs, Served


def main() -> int:
    """Send them, and print what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--canvas", type=int, default=32, help="positions of its canvases")
    parser.add_argument("--ways", nargs="*", default=[""], help="rules that requests choose from")
    parser.add_argument("--masked", action="store_true", help="its canvases hold masks")
    parser.add_argument("--rows", type=int, help="of each way and path; all if left out")
    arguments = parser.parse_args()
    pairs = Pairs(Served(arguments.url, arguments.canvas, arguments.ways, arguments.masked))
    pairs.singles()
    print("singles:", pairs.report, flush=True)
    pairs.excluded()
    print("excluded:", pairs.report, flush=True)
    pairs.rows(arguments.rows)
    print(pairs.report)
    print(*pairs.report.faults, sep="\n")
    return bool(pairs.report.faults)


if __name__ == "__main__":
    raise SystemExit(main())
