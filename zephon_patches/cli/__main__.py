"""The command line: ``zephon-data COMMAND`` or ``python -m zephon_patches.cli COMMAND``.

zephon-data prepare --config train_configs/llama3_debug.toml
zephon-data verify data_cache
zephon-data show --config train_configs/llama3_debug.toml --step 13
"""

import argparse
import io
import logging
import os
import sys

from zephon_patches.errors import ZephonError

__all__ = ["main"]

# As shells have it: 128 and the number of SIGINT or SIGPIPE.
_INTERRUPTED, _NOBODY_READS = 130, 141


def main(argv: list[str] | None = None) -> int:
    command = ""
    _prepare_streams()
    try:
        # Here, since Ctrl-C may come while they are imported.
        from zephon_patches.cli import audit, find, inspect, order, plot, prepare, show, verify

        parser = argparse.ArgumentParser(prog="zephon-data", description="Works with the data of training runs.")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for module in (prepare, verify, show, order, find, inspect, audit, plot):
            module.add_to(commands)
        arguments = parser.parse_args(argv)
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
