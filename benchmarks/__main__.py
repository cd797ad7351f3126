"""The commands of README.md: python -m benchmarks {maps,step,throughput}."""

import argparse
import json
import sys

from rich.console import Console

from soren_align.core.errors import UserError
from soren_align.core.silence import quiet_libraries

from . import shapes


def main(arguments: list[str] | None = None) -> int:
    """Run one benchmark and print its tables. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about in {
        "maps": "time, FLOPs and errors of every map",
        "step": "an optimizer step",
    }.items():
        command = commands.add_parser(name, help=about)
        command.add_argument("--shapes", default="llama-60m", help="a model or 512x1376,512x512")
        command.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU, if any")
        command.add_argument("--json", action="store_true", help="print JSON in place of tables")
    command.add_argument("--tokens", type=int, default=32768, help="per training step")
    commands.add_parser("throughput", help="whole runs against plain TRL; ten minutes")
    options = parser.parse_args(arguments)
    try:
        if options.command == "throughput":
            from . import throughput

            throughput.main()
        else:
            _measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(options: argparse.Namespace) -> None:
    # The shapes are checked before torch is imported, which takes seconds.
    matrices = shapes.parse(options.shapes)
    from . import maps, show, steps
    from .timing import find_device

    device, console = find_device(options.device), Console(stderr=True)
    # The spinner turns slowly: its thread takes time from what is measured.
    with quiet_libraries(), console.status("Measuring", refresh_per_second=2) as status:
        if options.command == "maps":
            results = maps.run(matrices, device, status.update)
        else:
            results = steps.run(matrices, device, options.tokens, status.update)
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 80).print(
            show.terminal(results), highlight=False
        )


if __name__ == "__main__":
    sys.exit(main())
