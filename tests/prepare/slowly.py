"""A processor that takes its time, so that a test can meet worker processes at work; set by SLOWLY, in seconds."""

import os
import time


def text(record):
    time.sleep(float(os.environ.get("SLOWLY", "0")))
    return record["text"]
