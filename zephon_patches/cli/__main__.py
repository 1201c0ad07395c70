"""The command line: ``zephon-data COMMAND`` or ``python -m zephon_patches.cli COMMAND``.

zephon-data prepare --config train_configs/llama3_debug.toml
zephon-data verify data_cache
zephon-data show --config train_configs/llama3_debug.toml --step 13
"""

import argparse
import importlib
import io
import logging
import os
import sys

from zephon_patches.errors import ZephonError

__all__ = ["COMMANDS", "main"]

# Each is a module of this package, which is imported if it is asked for: nobody waits for what other commands use.
COMMANDS = {
    "prepare": "tokenize sources ahead of time",
    "verify": "check finished stores: sizes, structure, checksums",
    "show": "which samples and documents stand at a place of the order, or in a step",
    "order": "which rank reads which samples, in which micro-batch",
    "find": "the samples that a document is in, and when they come",
    "inspect": "where a checkpoint stands in the data, and whether a run could go on from it",
    "audit": "prove from a run's traces that it trained on what the order says",
    "plot": "draw loss, data waiting time and mixture of a run over its samples",
}

# As shells have it: 128 and the number of SIGINT or SIGPIPE.
_INTERRUPTED, _NOBODY_READS = 130, 141


def main(argv: list[str] | None = None) -> int:
    command = ""
    _prepare_streams()
    try:
        argv = sys.argv[1:] if argv is None else argv
        arguments = _parser(argv).parse_args(argv)  # here, since Ctrl-C may come while a command is imported
        command = f" {arguments.command}"
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        status = int(arguments.run_command(arguments))
        sys.stdout.flush()  # here, where it can fail with one line
        return status
    except ZephonError as error:
        print(f"zephon-data{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"zephon-data{command}: interrupted; start it again to go on", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:  # of standard output, as a rule: other errors of the system are explained where they arise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try to write once more at its end
        if isinstance(error, BrokenPipeError):  # as of `| head`
            return _NOBODY_READS
        print(f"zephon-data{command}: {error}", file=sys.stderr)
        return 1


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of all commands; of the one that is asked for with its options."""
    parser = argparse.ArgumentParser(prog="zephon-data", description="Works with the data of training runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked_for = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == asked_for:
            importlib.import_module(f"zephon_patches.cli.{name}").add_to(command)
    return parser


def _prepare_streams() -> None:
    """Standard streams that can print any name, and that are there."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by who started this; the next file would get its number, and its output
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if descriptor == 0 else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
