"""Runs commands one by one, each in a fork of a process that has imported next to nothing, and says what they imported.

python -m tests.cli.imports_of '[["show", "--help"]]'
"""

import contextlib
import io
import json
import os
import sys

from zephon_patches.cli.__main__ import main


def imported_by(arguments: list[str]) -> dict[str, object]:
    """The exit status of a command, what it printed, and all modules that were imported in the end."""
    reading, writing = os.pipe()
    if not os.fork():
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                status = main(arguments)
            except SystemExit as exit:
                status = exit.code
        with os.fdopen(writing, "w") as pipe:
            json.dump({"status": status, "printed": out.getvalue(), "modules": sorted(sys.modules)}, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.load(pipe)
    os.wait()
    return found


if __name__ == "__main__":
    print(json.dumps([imported_by(arguments) for arguments in json.loads(sys.argv[1])]))
