"""The largest that a build takes: documents by their number and by their length."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import write_tokenizer
from tests.prepare.stores import documents_of, open_store
from zephon_patches.store.reader import TokenStore
from zephon_patches.store.verify import verify_store


def private_kib(pid: int) -> int:
    """Memory that a process and those that it started share with no other; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return own + sum(private_kib(int(child)) for child in children)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured in /proc")
def test_e19_3_million_documents_of_one_token_take_little_memory(tmp_path):
    """E19: by the command, in one shard, whose index and origins stay in memory until it is finished."""
    (tmp_path / "texts").mkdir()
    with open(tmp_path / "texts" / "a.jsonl", "w") as file:
        for _ in range(30):
            file.write('{"text":"0_0"}\n' * 100_000)
    write_tokenizer(tmp_path / "tokenizer", [1], eos=False)
    command = [sys.executable, "-m", "zephon_patches.cli", "prepare", "--source", f"web={tmp_path / 'texts'}"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--cache-dir", str(tmp_path / "cache")]
    command += ["--shard-bytes", str(1 << 30)]
    peak = 0
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=quiet, stderr=quiet) as process:
        while process.poll() is None:
            peak = max(peak, private_kib(process.pid))
            time.sleep(0.05)
    assert process.returncode == 0
    (manifest,) = tmp_path.glob("cache/web/*/manifest.json")
    store = TokenStore(manifest.parent)
    assert (store.num_documents, store.num_tokens, len(store.tokens_per_shard)) == (3_000_000, 3_000_000, 1)
    assert verify_store(store.folder) == []
    assert 20 * 1024 < peak < 400 * 1024


def test_a_document_above_65536_tokens_is_one_document(tmp_path):
    lengths = [3, 70_000, 1, 2**17 + 1]
    (tmp_path / "texts").mkdir()
    for number, length in enumerate(lengths):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}_0 " * length)
    write_tokenizer(tmp_path / "tokenizer", [1] * 4)
    store = open_store(tmp_path, shard_bytes=1 << 30)
    found = documents_of(store)
    assert [np.unique(ids).tolist() for ids in found] == [[number, 5] for number in range(4)]  # 5 is EOS
    assert [len(ids) for ids in found] == [length + 1 for length in lengths]
    assert verify_store(store.folder) == []
