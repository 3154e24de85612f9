"""`python -m benchmarks [capture …]`: the tables named, or all of them."""

import sys

from benchmarks import capture

BENCHMARKS = {"capture": capture.run}


def main(names: list[str]) -> int:
    """Run the benchmarks; 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"No benchmark is called {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(BENCHMARKS[name](), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
