"""The console command `asymloop`: every subcommand lives in the file of its idea and adds itself here."""

import argparse
import sys

from . import comparison, demo, evaluation, inspection, perplexity_command, spectra
from .command_options import USER_ERRORS

COMMANDS = (demo, evaluation, perplexity_command, comparison, inspection, spectra)


def main(argv=None) -> int:
    """Run `asymloop` on a list of arguments (default: the command line's) and return the exit status.

    A module of `COMMANDS` has `add_command(subparsers)`, which sets `run`, a function of the parsed arguments.
    """
    parser = argparse.ArgumentParser(prog="asymloop", description="AsymLoop, an asymmetric looped transformer.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(subparsers)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except USER_ERRORS as error:
        print(f"asymloop: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"\nasymloop: interrupted; {str(interrupt) or 'nothing was kept'}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
