"""Builds a store in a process of its own, so that a test can kill it.

    python -m tests.prepare.slow_build TEXTS TOKENIZER CACHE SHARD_BYTES SECONDS ONE_PER_MACHINE [KILL_AT]

Every batch of documents takes SECONDS more (or never ends: inf), and batches are small. When it is ready to begin it
says so, and begins when it is told a line. At the end it says how many units it built. With KILL_AT the process kills
itself there: moment 2k is right before its k-th rename, moment 2k + 1 right after it. With KILL_AT "each" it forks a
builder for each moment from 0 on, with a cache of its own (CACHE-0, CACHE-1, ...), until one ends by itself, and prints
how each ended.
"""

import itertools
import logging
import os
import signal
import sys
import time

from zephon_patches.config import SourceConfig
from zephon_patches.prepare import build, builder, encoding, progress
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


def at_each_moment(cache: str, *arguments: str) -> None:
    for moment in itertools.count():
        if (child := os.fork()) == 0:
            build_store(arguments[0], arguments[1], f"{cache}-{moment}", *arguments[2:], str(moment))
            return
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("moment", moment, "ended with", ended, flush=True)
        if ended != -signal.SIGKILL:
            return


def build_store(
    texts: str, tokenizer: str, cache: str, shard_bytes: str, seconds: str, one_per_machine: str, *moment: str
) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    encoding._BATCH_DOCUMENTS = 4
    progress._PROGRESS_SECONDS = progress._REPORT_SECONDS = builder._REPORT_SECONDS = 0.05
    build._POLL_SECONDS = builder._POLL_SECONDS = 0.02
    builder._QUIET_SECONDS = 0.0
    if moment:
        kill_at(int(moment[0]))
    encoder = TextTokenizer(tokenizer)
    encode_batch = encoder.encode_batch

    def slow(texts):
        time.sleep(min(float(seconds), 3600))
        return encode_batch(texts)

    encoder.encode_batch = slow
    built = set()  # not those that another has finished between two looks
    build_from = builder.Builder._build_from
    builder.Builder._build_from = lambda one, number, *rest: (built.add(number), build_from(one, number, *rest))
    print("ready", flush=True)
    sys.stdin.readline()
    source = FileInput(SourceConfig(name="web", path=texts))
    building = build.Building(one_per_machine=one_per_machine == "1")
    store = build.open_or_build(source, encoder, cache, int(shard_bytes), building=building)
    print("store", store.folder, store.manifest.tokens, flush=True)
    print("built", len(built), flush=True)


if __name__ == "__main__":
    if sys.argv[-1] == "each":
        texts, tokenizer, cache, *others = sys.argv[1:-1]
        at_each_moment(cache, texts, tokenizer, *others)
    else:
        build_store(*sys.argv[1:])
