"""The command line: ``zephon-data COMMAND`` or ``python -m zephon_patches.cli COMMAND``.

zephon-data prepare --config train_configs/llama3_debug.toml
zephon-data verify data_cache
zephon-data show --config train_configs/llama3_debug.toml --step 13
"""

import argparse
import logging
import sys

from zephon_patches.errors import ZephonError

__all__ = ["main"]

_INTERRUPTED = 130  # as shells have it: 128 and the number of SIGINT


def main(argv: list[str] | None = None) -> int:
    command = ""
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
        return int(arguments.run_command(arguments))
    except ZephonError as error:
        print(f"zephon-data{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"zephon-data{command}: interrupted; start it again to go on", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
