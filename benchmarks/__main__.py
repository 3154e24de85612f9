"""`python -m benchmarks [NAME …] [--json]`: the tables named, or all of them."""

import sys
from collections.abc import Callable

from benchmarks import capture, generate
from benchmarks.report import Report
from interp.errors import UserError

BENCHMARKS: dict[str, Callable[[], Report]] = {"capture": capture.run, "generate": generate.run}


def main(arguments: list[str]) -> int:
    """Print each benchmark's table, with --json one line of JSON behind each; 2 on bad input."""
    as_json, names = "--json" in arguments, [argument for argument in arguments if argument != "--json"]
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"No benchmark is called {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    try:
        for name in names or BENCHMARKS:
            report = BENCHMARKS[name]()
            print(report.text(), flush=True)
            if as_json:
                print(report.json(), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
