"""``zephon-data plot``: draws a run from its traces.

    zephon-data plot outputs -o run.png

Loss, data waiting time and realized mixture over the samples of the order, with the changes of topology marked. The run
needs data.trace = true; drawing needs matplotlib: pip install 'torchtitan-zephon[plot]'.
"""

import argparse
from pathlib import Path

from zephon_patches.errors import ConfigError

__all__ = ["add_to"]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.description = __doc__
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="the run's job.dump_folder")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="the picture: .png, .svg, .pdf"
    )
    parser.add_argument("--window", metavar="STEPS", type=int, default=10, help="steps of a mixture's mean (10)")
    parser.set_defaults(run_command=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.window < 1:
        raise ConfigError(f"--window {arguments.window}: expected at least 1 step")
    from zephon_patches.trace.plot import plot_run

    plot_run(arguments.run_folder, arguments.output, arguments.window)
    print(f"drawn in {arguments.output}")
    return 0
