"""Benchmarks: `python -m training.benchmark COMMAND [--flag value ...]`; each writes a JSON file and prints a table."""

import argparse
import sys
from collections.abc import Sequence

from training import conversion_check, decode_speed, initialisation, sharing_speed, stream_memory, train_speed

BENCHMARKS = {
    "conversion": conversion_check,
    "decode": decode_speed,
    "initialisation": initialisation,
    "sharing": sharing_speed,
    "streaming": stream_memory,
    "train": train_speed,
}
TAKES_TRAINING_FLAGS = {"initialisation"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.benchmark", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, benchmark in BENCHMARKS.items():
        first_line = str(benchmark.__doc__).splitlines()[0]
        command = commands.add_parser(name, help=first_line, description=benchmark.__doc__, allow_abbrev=False)
        benchmark.add_arguments(command)
    options, flags = parser.parse_known_args(arguments)
    if flags and options.command not in TAKES_TRAINING_FLAGS:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    return BENCHMARKS[options.command].run(options, flags)


if __name__ == "__main__":
    sys.exit(main())
