"""Index, cache, files. Kills in mid-build (H11) and the order of listing (H08) are in tests/prepare as well."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.corpora import D240, E48, Corpus, make_corpus, write_jsonl, write_tokenizer
from tests.prepare.stores import contents, open_store, process, write_mixed
from tests.resume import Place, Run, builder, check_steps, expected_stream
from zephon_patches.errors import InputError, StateError
from zephon_patches.prepare.tokenizers import TextTokenizer
from zephon_patches.store.reader import TokenStore

REPOSITORY = Path(__file__).parents[2]


def no_tokenizing(monkeypatch):
    def refuse(self, texts):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(TextTokenizer, "encode_batch", refuse)


def stores(corpus: Corpus) -> list[Path]:
    return sorted(corpus.folder.glob("cache/web/*/manifest.json"))


def test_h01_nodes_with_disks_of_their_own_build_the_same(tmp_path):
    """H01: copies of the data, with other times, in two processes."""
    nodes = [write_mixed(tmp_path / name) for name in ("node0", "node1")]
    for path in nodes[1].glob("texts/**/*.*"):
        os.utime(path, ns=(1_000, 1_000))
    builders = [process(node, 0.01) for node in nodes]
    outputs = [builder.communicate(timeout=60)[0] for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0], outputs
    folders = [Path(re.search(r"^store (\S+)", output, re.M).group(1)) for output in outputs]
    assert folders[0] != folders[1]
    assert folders[0].name == folders[1].name
    one, other = (
        {name: data for name, data in contents(folder).items() if name.endswith((".bin", ".idx", ".origin"))}
        for folder in folders
    )
    assert one == other
    assert len({TokenStore(folder).manifest.data_fingerprint for folder in folders}) == 1


def test_h02_no_rank_reads_a_store_before_it_is_finished(tmp_path):
    """H02: four processes at once with a slow builder, several rounds."""
    folder = write_mixed(tmp_path)
    whole = None
    for _ in range(3):
        ranks = [process(folder, 0.01) for _ in range(4)]
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 4, outputs
        assert sum("built in" in output for output in outputs) == 1
        found = contents(open_store(folder).folder)
        whole = whole or found
        assert found == whole
        shutil.rmtree(folder / "cache")


@pytest.mark.parametrize("runs", [1, 2])
def test_h04_killed_run_leaves_nothing_that_stops_the_next(tmp_path, runs):
    """H04: with worker processes; one run or two at once, killed without warning, started again at once."""
    corpus = make_corpus(tmp_path, E48)
    code = """
        import os, sys
        from pathlib import Path
        from tests.corpora import E48, Corpus
        from tests.resume import Place, builder
        loader = builder(Corpus(Path(sys.argv[1]), E48, True))(Place(1, 4, 12, 2), 0)
        print("pid", os.getpid(), flush=True)
        for number, _ in enumerate(loader):
            if number % 3 == 2:
                children = open(f"/proc/self/task/{os.getpid()}/children").read() if os.path.exists("/proc") else ""
                print("cursor", loader.cursor, "children", children, flush=True)
            if loader.cursor == 120 and len(sys.argv) > 2:
                break
    """

    def start(*stop: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(corpus.folder), *stop],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )

    killed = [start() for _ in range(runs)]
    pids = set()
    for run in killed:
        for line in run.stdout:
            if line.startswith("cursor"):
                pids |= {str(run.pid), *line.partition("children")[2].split()}
                break
        run.send_signal(signal.SIGKILL)
        run.wait()
    again = [start("stop") for _ in range(runs)]
    for run in again:
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert "cursor 120" in output
    # Workers notice that their parent is gone within seconds; nothing that carries their name may stay.
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = (
        [name for name in os.listdir("/dev/shm") if pids & set(re.split(r"[_-]", name))]
        if os.path.isdir("/dev/shm")
        else []
    )
    assert left == []
    assert not list(corpus.folder.rglob("*.tmp"))


def test_h05_another_tokenizer_under_the_same_name_gets_a_store_of_its_own(tmp_path):
    """H05: permuted ids in the same file; the store is not reused, and a checkpoint does not load across."""
    corpus = make_corpus(tmp_path, E48)
    run = Run(builder(corpus), Place(1, 12))
    run.step()
    state = run.state()
    content = (corpus.tokenizer / "tokenizer.json").read_text()
    swapped = content.replace('"0_0"', '"x"').replace('"0_1"', '"0_0"').replace('"x"', '"0_1"')
    added = content.replace(
        '"added_tokens": []',
        '"added_tokens": [{"id": 999, "content": "<new>", "single_word": false, '
        '"lstrip": false, "rstrip": false, "normalized": false, "special": true}]',
    )
    for number, changed in enumerate((swapped, added), start=2):
        assert changed != content
        (corpus.tokenizer / "tokenizer.json").write_text(changed)
        other = Run(builder(corpus), Place(1, 12))
        assert len(stores(corpus)) == number
        with pytest.raises(StateError, match="tokenizer"):
            other.load(state)
    (corpus.tokenizer / "tokenizer.json").write_text(content)
    back = Run(builder(corpus), Place(1, 12))
    back.load(state)
    assert len(stores(corpus)) == 3


@pytest.mark.parametrize("linked", [False, True])
def test_h07_data_and_cache_may_move_between_stop_and_resume(tmp_path, monkeypatch, linked):
    """H07: by mv, and seen through a link."""
    corpus = make_corpus(tmp_path / "a", D240, files=3)
    expected = expected_stream(corpus)
    run = Run(builder(corpus), Place(2, 3))
    check_steps(run, expected, 7)
    state = run.state()
    shutil.move(tmp_path / "a", tmp_path / "b")
    if linked:
        (tmp_path / "c").symlink_to(tmp_path / "b")
    moved = Corpus(tmp_path / ("c" if linked else "b"), D240, True)
    no_tokenizing(monkeypatch)
    resumed = Run(builder(moved), Place(3, 4))
    resumed.load(state)
    check_steps(resumed, expected, 25)
    assert len(stores(moved)) == 1


def test_h08_order_in_which_files_were_made_leaves_no_trace(tmp_path, monkeypatch):
    """H08: the store and the order are the same, with names 1, 2, 10, a, B, e-acute."""
    names = ["1", "10", "2", "B", "a", "\u00e9"]  # in the stated order: that of their bytes
    lengths = D240[:60]
    corpora = []
    for number, order in enumerate((range(6), reversed(range(6)))):
        corpus = Corpus(tmp_path / str(number), lengths, True)
        for i in order:
            write_jsonl(corpus.texts / f"{names[i]}.jsonl", lengths[i * 10 : i * 10 + 10], i * 10)
        write_tokenizer(corpus.tokenizer, lengths)
        corpora.append(corpus)
    iterdir = Path.iterdir
    monkeypatch.setattr(
        Path, "iterdir", lambda self: sorted(iterdir(self), key=lambda path: path.name[::-1], reverse=True)
    )
    runs = [Run(builder(corpus), Place(1, 12)) for corpus in corpora]
    assert runs[0].state() == runs[1].state()
    expected = expected_stream(corpora[0])
    for run in runs:
        check_steps(run, expected, 7)


@pytest.mark.parametrize("name", ["missing", "nothing/*.jsonl", "empty"])
def test_g10_source_without_files_is_never_left_out(tmp_path, name):
    """G10: path missing, glob that matches nothing, empty folder; also with a half-built store."""
    folder = write_mixed(tmp_path)
    process(folder, 0, moment=44).wait()
    (folder / "empty").mkdir()
    with pytest.raises(InputError, match=rf"{re.escape(name)} matches no file, and .* has no finished store"):
        open_store(folder, path=str(folder / name))


def test_h13_store_made_ahead_serves_all_ranks_without_the_texts(tmp_path, monkeypatch):
    """H13: built by another process, then four ranks start with the texts renamed away."""
    corpus = make_corpus(tmp_path, D240, files=2)
    expected = expected_stream(corpus)
    code = """
        import sys
        from pathlib import Path
        from tests.corpora import D240, Corpus
        from tests.resume import Place, builder
        builder(Corpus(Path(sys.argv[1]), D240, True))(Place(1, 12), 0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], cwd=REPOSITORY, check=True, timeout=60)
    shutil.move(corpus.texts, tmp_path / "away")
    no_tokenizing(monkeypatch)
    check_steps(Run(builder(corpus), Place(4, 3)), expected, 30)
