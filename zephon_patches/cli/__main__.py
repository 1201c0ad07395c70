"""The command line: ``zephon-data COMMAND`` or ``python -m zephon_patches.cli COMMAND``.

zephon-data prepare --config train_configs/llama3_debug.toml
zephon-data verify data_cache
"""

import argparse
import logging
import sys

from zephon_patches.cli import prepare, verify
from zephon_patches.errors import ZephonError

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="zephon-data", description="Works with the data of training runs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    prepare.add_to(commands)
    verify.add_to(commands)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return int(arguments.run(arguments))
    except ZephonError as error:
        print(f"zephon-data {arguments.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
