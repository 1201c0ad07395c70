"""Data sets of a hub by their name, through ``datasets`` itself, against a hub on this machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import write_tokenizer
from tests.prepare.fake_hub import FakeHub, serving
from tests.prepare.stores import documents_of
from zephon_patches import DataConfig, SourceConfig
from zephon_patches.config import data_config_from_table
from zephon_patches.errors import ConfigError
from zephon_patches.prepare.inputs import make_input
from zephon_patches.prepare.repair import rebuild_command
from zephon_patches.store.reader import TokenStore

REPOSITORY = Path(__file__).parents[2]
NAME = "org/some-corpus"

# Runs commands one after the other, then says how they ended and which heavy modules were imported.
SCRIPT = """
import json, sys, time
time.sleep = lambda seconds: None  # between attempts to reach a hub
from zephon_patches.cli.__main__ import main
ended = [main(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([ended, sorted({"datasets", "huggingface_hub", "torch"} & set(sys.modules))]))
"""


def lines(first: int, last: int) -> bytes:
    return "".join(json.dumps({"text": f"0_{i} 0_{i}", "ids": [i]}) + "\n" for i in range(first, last)).encode()


FILES = {"train-0.jsonl": lines(0, 3), "train-1.jsonl": lines(3, 5), "test.jsonl": lines(7, 8)}
TRAIN = [[i, i, 11] for i in range(5)]


class Machine:
    """A folder with caches of its own, which may reach the hub or not."""

    def __init__(self, folder: Path, hub: FakeHub) -> None:
        self.folder = folder
        self.hub = hub
        write_tokenizer(folder / "tokenizer", [10])

    def prepare(self, *options: str, cache: str = "cache", hub: bool = True, code: int = 0, runs: int = 1, **env: str):
        """Runs the command in a process of its own: its output, and the modules that it imported."""
        arguments = ["prepare", "--source", f"web=hf://{NAME}", "--tokenizer", str(self.folder / "tokenizer")]
        arguments += ["--cache-dir", str(self.folder / cache), *options]
        endpoint = self.hub.url if hub else "http://127.0.0.1:9"  # where nobody listens
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ended = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps([arguments] * runs)],
            cwd=self.folder,
            env={
                **kept,
                "HF_ENDPOINT": endpoint,
                "HF_HOME": str(self.folder / "home"),
                "NO_PROXY": "127.0.0.1",
                "PYTHONPATH": str(REPOSITORY),
                **env,
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        codes, modules = json.loads(ended.stdout.splitlines()[-1])
        assert codes == [code] * runs, ended.stderr
        return ended.stdout + ended.stderr, modules

    def stores(self, cache: str = "cache") -> list[TokenStore]:
        found = [path.parent for path in (self.folder / cache).glob("web/*/manifest.json")]
        return [TokenStore(path) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


@pytest.fixture(scope="module")
def hub():
    with serving() as hub:
        yield hub


@pytest.fixture(scope="module")
def prepared(hub, tmp_path_factory):
    """A machine that has prepared the first commit, and what it said."""
    commit = hub.push(NAME, FILES)
    machine = Machine(tmp_path_factory.mktemp("first"), hub)
    said, _ = machine.prepare(runs=2)
    return machine, commit, said


@pytest.fixture
def machine(hub, tmp_path):
    hub.push(NAME, FILES)
    return Machine(tmp_path, hub)


def test_a_split_is_loaded_and_its_commit_told(prepared):
    machine, commit, said = prepared
    [store] = machine.stores()
    assert documents_of(store) == TRAIN
    assert f"source 'web': hf://{NAME}, revision main is commit {commit}" in said
    assert [file.name for file in store.manifest.files] == [f"{commit}/some-corpus-train.arrow"]
    assert store.manifest.recipe["hub"] == [NAME, "", "", ""]
    assert len(re.findall(r"^web +training +5 +15 ", said, re.MULTILINE)) == 2


def test_a_finished_store_is_found_by_its_commit_alone(prepared):
    machine, _, _ = prepared
    machine.hub.asked.clear()
    _, modules = machine.prepare(HF_HOME=str(machine.folder / "none"))
    assert [asked for asked in machine.hub.asked if NAME in asked] == [f"GET /api/datasets/{NAME}/revision/main"]
    assert modules == ["huggingface_hub"]
    assert len(machine.stores()) == 1


def test_a_commit_needs_no_hub_once_its_store_is_there(prepared):
    machine, commit, _ = prepared
    machine.prepare("--revision", commit, cache="pinned")
    machine.hub.asked.clear()
    _, modules = machine.prepare("--revision", commit, cache="pinned", HF_HOME=str(machine.folder / "none"))
    assert (machine.hub.asked, modules) == ([], [])
    [store] = machine.stores("pinned")
    assert documents_of(store) == TRAIN


def test_a_store_is_the_same_on_another_machine_but_for_times(prepared, machine):
    first, _, _ = prepared
    machine.prepare(HF_DATASETS_CACHE=str(machine.folder / "elsewhere" / "datasets"))
    [one], [other] = first.stores(), machine.stores()
    assert one.folder.name == other.folder.name
    assert one.manifest.shards == other.manifest.shards  # also the hashes of the files' bytes
    assert str(machine.folder) not in (other.folder / "manifest.json").read_text()


def test_a_revision_that_moved_gives_another_store_also_with_files_of_the_same_size(prepared, hub, machine):
    machine.prepare()
    commit = hub.push(NAME, {**FILES, "train-0.jsonl": lines(0, 3).replace(b"0_0", b"0_9")})
    said, _ = machine.prepare()
    assert f"is commit {commit}" in said
    before, after = machine.stores()
    assert documents_of(before) == TRAIN
    assert documents_of(after) == [[9, 9, 11], *TRAIN[1:]]
    assert [file.bytes for file in before.manifest.files] == [file.bytes for file in after.manifest.files]
    assert before.folder.name.partition("-")[0] == after.folder.name.partition("-")[0]  # the recipe


@pytest.mark.parametrize("offline", [{"HF_HUB_OFFLINE": "1"}, {"hub": False}])
def test_without_a_network_the_caches_or_the_store_serve(prepared, offline):
    machine, commit, _ = prepared
    cache = f"cache-{'-'.join(offline)}"
    said, _ = machine.prepare(cache=cache, **offline)
    assert "the hub cannot be asked" in said and f"going on with commit {commit}" in said
    [store] = machine.stores(cache)
    assert documents_of(store) == TRAIN
    said, _ = machine.prepare(cache=cache, HF_HOME=str(machine.folder / "none"), **offline)
    assert f"using its store {store.folder}" in said


def test_without_a_network_caches_and_store_there_is_one_error(machine):
    said, _ = machine.prepare(hub=False, code=1)
    assert f"source 'web': hf://{NAME} cannot be had: the hub cannot be asked" in said
    assert "has no finished store of it for this tokenizer and these settings; correct path, subset" in said
    assert "bring the store or the caches (HF_HOME) here" in said
    assert "Traceback" not in said


def test_another_revision_in_the_cache_is_not_taken_for_the_one_that_is_set(prepared):
    machine, commit, _ = prepared
    for revision, text in (("v2", "says which commit revision v2 is"), ("0" * 40, f"has commit {commit} in its cache")):
        said, _ = machine.prepare("--revision", revision, cache="other", code=1, HF_HUB_OFFLINE="1")
        assert text in said
    assert machine.stores("other") == []


def test_branches_subsets_splits_and_fields(hub, machine):
    readme = (
        b"---\nconfigs:\n- config_name: one\n  data_files: train-0.jsonl\n"
        b"- config_name: two\n  data_files:\n  - split: held.out\n    path: test.jsonl\n---\n"
    )
    hub.push(NAME, {**FILES, "README.md": readme}, branch="v2")
    machine.prepare("--revision", "v2", "--subset", "one")
    machine.prepare("--revision", "v2", "--subset", "two", "--split", "held.out", "--token-field", "ids")
    one, two = machine.stores()
    assert documents_of(one) == TRAIN[:3]
    assert documents_of(two) == [[7]]
    assert two.manifest.recipe["hub"] == [NAME, "two", "held.out", "v2"]
    command = rebuild_command(two.folder)
    assert f"prepare --source web=hf://{NAME} --tokenizer TOKENIZER" in command
    assert "--token-field ids --subset two --split held.out --revision v2" in command


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--split", "nowhere"), "nowhere"),
        (("--subset", "nothing"), "nothing"),
        (("--revision", "no/such"), "RevisionNotFoundError"),
    ],
)
def test_what_the_data_set_has_not_is_an_error_with_its_name(machine, options, text):
    said, _ = machine.prepare(*options, code=1)
    assert f"hf://{NAME} cannot be had: " in said and text in said and "Traceback" not in said


def test_a_folder_of_the_same_name_is_not_loaded_instead(machine):
    (machine.folder / NAME).mkdir(parents=True)
    (machine.folder / NAME / "train.jsonl").write_bytes(lines(9, 10))
    said, _ = machine.prepare(code=1)
    assert f"{machine.folder / NAME} is there, and `datasets` would load that instead" in said


def test_the_command_that_is_advised_names_all_that_is_set():
    source = SourceConfig("web", "hf://org/name", subset="en", split="train", revision="v1", token_field="ids")
    expected = ["--source", "web=hf://org/name", "--token-field", "ids", "--subset", "en", "--split", "train"]
    assert make_input(source).prepare_arguments() == [*expected, "--revision", "v1"]


# --- settings ---


@pytest.mark.parametrize(
    "path", ["hf://", "hf://a/b/c", "hf://datasets/a/b", "hf://../b", "hf://a/..", "hf://a b", "hf:///a"]
)
def test_a_name_that_is_none_is_refused(path):
    with pytest.raises(ConfigError, match="expected hf://ORGANISATION/NAME"):
        SourceConfig("web", path)


@pytest.mark.parametrize("split", ["train[:10%]", "train+test", "train[5:]", " ", "a/b", "../x"])
def test_a_part_or_a_sum_of_splits_is_refused(split):
    with pytest.raises(ConfigError, match="expected the name of one split"):
        SourceConfig("web", "hf://a/b", split=split)


@pytest.mark.parametrize("revision", ["../x", "a/../b", "/etc", "a b"])
def test_a_revision_is_a_name(revision):
    with pytest.raises(ConfigError, match="expected the name of a branch or tag"):
        SourceConfig("web", "hf://a/b", revision=revision)


@pytest.mark.parametrize("key", ["subset", "split", "revision"])
def test_keys_of_the_hub_go_with_its_paths_alone(key):
    assert getattr(SourceConfig("web", "hf://name", **{key: "x"}), key) == "x"
    with pytest.raises(ConfigError, match=f"{key} = 'x' is of data sets of the Hugging Face hub"):
        SourceConfig("web", "texts", **{key: "x"})
    with pytest.raises(ConfigError, match=f"{key} = 3: expected a string"):
        SourceConfig("web", "hf://name", **{key: 3})


def test_the_keys_stand_in_a_source_s_table():
    table = {"sources": [{"name": "web", "path": "hf://allenai/c4", "subset": "en", "revision": "main"}]}
    config = data_config_from_table(table, "run.toml")
    assert config == DataConfig(sources=[SourceConfig("web", "hf://allenai/c4", subset="en", revision="main")])
