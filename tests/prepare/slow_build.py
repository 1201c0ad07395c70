"""Builds a store in a process of its own, so that a test can kill it.

    python -m tests.prepare.slow_build TEXTS TOKENIZER CACHE SHARD_BYTES SECONDS [KILL_AT]

Every batch of documents takes SECONDS more, and batches are small. With KILL_AT the process kills itself there:
moment 2k is right before its k-th rename, moment 2k + 1 right after it.
"""

import logging
import os
import signal
import sys
import time

from zephon_patches.config import SourceConfig
from zephon_patches.prepare import build, encoding
from zephon_patches.prepare.shards import FileInput
from zephon_patches.prepare.tokenizers import TextTokenizer


def kill_at(moment: int) -> None:
    replace, passed = os.replace, 0

    def counted(*paths):
        nonlocal passed
        if passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)
        if passed + 1 == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 2

    os.replace = counted


def main() -> None:
    texts, tokenizer, cache, shard_bytes, seconds, *moment = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    encoding._BATCH_DOCUMENTS = 4
    build._PROGRESS_SECONDS = build._REPORT_SECONDS = 0.05
    build._POLL_SECONDS = 0.02
    if moment:
        build._PROGRESS_SECONDS = float("inf")  # the progress file is renamed as well
        kill_at(int(moment[0]))
    encoder = TextTokenizer(tokenizer)
    encode_batch = encoder.encode_batch

    def slow(texts):
        time.sleep(float(seconds))
        return encode_batch(texts)

    encoder.encode_batch = slow
    print("ready", flush=True)
    store = build.open_or_build(FileInput(SourceConfig(name="web", path=texts)), encoder, cache, int(shard_bytes))
    print("store", store.folder, store.manifest.tokens, flush=True)


if __name__ == "__main__":
    main()
