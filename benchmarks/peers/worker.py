"""Runs one adapter inside its environment and does what the command asks for, a JSON line in, a JSON line out.

    python -m benchmarks.peers.worker NAME

It stays open, so that the command can alternate between peers. What a peer prints goes to stderr.
"""

import json
import logging
import os
import sys
import traceback
from typing import Any

from benchmarks.peers import tasks
from benchmarks.peers.adapters import Unsupported, load_adapter


def main() -> None:
    logging.disable(logging.WARNING)  # what loaders say of themselves while they are measured
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    questions = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    answer: dict[str, Any]
    peer = None
    for line in questions:
        try:
            request = json.loads(line)
            if peer is None:
                peer = load_adapter(sys.argv[1])
            answer = getattr(tasks, request.pop("do"))(peer, **request)
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": tasks.one_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
