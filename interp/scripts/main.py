"""`interp`: every command under one name."""

import sys
from collections.abc import Callable
from typing import Any

from interp.scripts import bench, capture, demo, doctor, generate, names, points, trace, train_transcoders
from interp.scripts.console import finish

COMMANDS: dict[str, tuple[type, Callable[[Any], int | None]]] = {
    "points": (points.Points, points.run),
    "doctor": (doctor.Doctor, doctor.run),
    "names": (names.Names, names.run),
    "capture": (capture.CaptureCommand, capture.run),
    "generate": (generate.Generate, generate.run),
    "train-transcoders": (train_transcoders.TrainTranscoders, train_transcoders.run),
    "trace": (trace.Trace, trace.run),
    "bench": (bench.Bench, bench.run),
    "demo": (demo.Demo, demo.run),
}


def main() -> None:
    """Entry point of `interp`."""
    import tyro

    config = tyro.extras.subcommand_cli_from_dict(
        {name: config for name, (config, _) in COMMANDS.items()},  # type: ignore[arg-type]
        prog="interp",
        description="Name every place inside a transformer, prove the name, and carry the tensor to circuits.",
    )
    run = next(run for config_type, run in COMMANDS.values() if type(config) is config_type)
    finish(run, config)


if __name__ == "__main__":
    sys.exit(main())
