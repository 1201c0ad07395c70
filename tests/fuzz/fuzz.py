"""Coverage-guided fuzzing of all that reads a file or a table from elsewhere.

    python -m venv --system-site-packages /tmp/fuzz && /tmp/fuzz/bin/pip install atheris
    PYTHONPATH=. /tmp/fuzz/bin/python -m tests.fuzz.fuzz TARGET [-max_total_time=600] [CORPUS]

Atheris (Linux, Python 3.11 to 3.13) is no dependency of the project. TARGET is one of those in ``TARGETS``; what
follows goes to libFuzzer. A run ends at the first fault and leaves its input in ``crash-*``; what is found becomes an
ordinary test beside the module.

A fault is any exception that is not the package's own, memory far above the size of what is read (the address space is
limited to ``_ROOM_BYTES`` more than at the start), a file opened or looked at outside the folder, and, where the input
is whole, a wrong result.

Bytes are used in two ways, for each way finds what the other does not: as the content of a file, and as choices that
change a sound one in a few places, with every checksum made right again.
"""

import contextlib
import json
import logging
import os
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atheris
import numpy as np
import xxhash

with atheris.instrument_imports(include=["zephon_patches"]):
    from tests.corpora import write_tokenizer
    from tests.prepare.stores import contents, open_store, write_mixed
    from tests.store.test_reader import make_store
    from zephon_patches.config import Data, data_config_from_table
    from zephon_patches.errors import ConfigError, InputError, StateError, StoreError, ZephonError
    from zephon_patches.keys import fingerprint
    from zephon_patches.loader.state import check_order, describe_order, read_state
    from zephon_patches.prepare.tokenizers import TextTokenizer
    from zephon_patches.samples.packed import fill_rows, packed_shard
    from zephon_patches.samples.plan_file import ensure_plan, open_plan, plan_path
    from zephon_patches.store.history import file_changes
    from zephon_patches.store.manifest import Manifest
    from zephon_patches.store.reader import TokenStore
    from zephon_patches.store.verify import verify_store
    from zephon_patches.store.writer import ShardWriter

_ROOM_BYTES = 512 << 20
_FOLDER = Path(tempfile.mkdtemp(prefix="fuzz", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))

_NUMBERS = [0, 1, -1, 2, 2**31 - 1, 2**31, 2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 16**5000]
_TEXTS = ["", ".", "..", "/", "../x", "/etc/passwd", "a/../../b", "\0", "\ud800", "x" * 300, "000000-000", "NaN", "<u2"]
_OTHERS = [None, True, False, 0.0, 1.5, -0.0, 1e308, float("inf"), float("nan"), [], {}, [[]], [None], [{}], {"": 1}]


@contextlib.contextmanager
def _no_limits() -> Iterator[None]:
    """The fuzzer itself may write what the package must refuse."""
    depth, digits = sys.getrecursionlimit(), sys.get_int_max_str_digits()
    sys.setrecursionlimit(20_000)
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        sys.set_int_max_str_digits(digits)


def _json(content: Any) -> bytes:
    with _no_limits():
        return json.dumps(content).encode("ascii")  # lone surrogates too, as \\ud800


class Choices(atheris.FuzzedDataProvider):
    """Bytes read as choices."""

    extremes = True
    """Whether values may be too deep or too long to be shown in a message"""

    def one_of(self, options: list[Any]) -> Any:
        return options[self.ConsumeIntInRange(0, len(options) - 1)]

    def value(self, depth: int = 0) -> Any:
        """Plain data of any kind."""
        kind = self.ConsumeIntInRange(0, 7)
        if kind == 0:
            return self.one_of(_NUMBERS if self.extremes else _NUMBERS[:-1])
        if kind == 1:
            return self.one_of(_TEXTS)
        if kind == 2:
            return self.one_of(_OTHERS)
        if kind == 3:
            return self.ConsumeInt(8)
        if kind == 4:
            return self.ConsumeUnicode(12)
        if kind == 5 and depth < 3:
            return [self.value(depth + 1) for _ in range(self.ConsumeIntInRange(0, 3))]
        if kind == 6 and depth < 3:
            return {self.ConsumeUnicode(6): self.value(depth + 1) for _ in range(self.ConsumeIntInRange(0, 3))}
        deep: Any = None
        for _ in range(self.one_of([1, 10, 100, 240, 300, 900, 960, 990] if self.extremes else [1, 10])):
            deep = [deep] if kind == 7 else {"a": deep}
        return deep

    def changed(self, data: Any) -> Any:
        """Plain data with a few places changed, taken out or put in."""
        data = json.loads(_json(data))
        for _ in range(self.ConsumeIntInRange(1, 4)):
            data = self._change(data)
        return data

    def _change(self, data: Any) -> Any:
        if isinstance(data, dict) and data and self.ConsumeIntInRange(0, 7):
            key = self.one_of(sorted(data))
            if not self.ConsumeIntInRange(0, 9):
                return {k: v for k, v in data.items() if k != key}
            if not self.ConsumeIntInRange(0, 9):
                return {**data, self.ConsumeUnicode(6): self.value()}
            return {**data, key: self._change(data[key])}
        if isinstance(data, list) and data and self.ConsumeIntInRange(0, 7):
            place = self.ConsumeIntInRange(0, len(data) - 1)
            change = self.ConsumeIntInRange(0, 9)
            middle = [] if change == 0 else [data[place]] * 2 if change == 1 else [self._change(data[place])]
            return [*data[:place], *middle, *data[place + 1 :]]
        if isinstance(data, int) and not isinstance(data, bool) and self.ConsumeBool():
            return data + self.ConsumeIntInRange(-3, 3)
        return self.value()

    def damaged(self, good: bytes) -> bytes:
        """Bytes with a few changed, then cut off or prolonged."""
        bad = bytearray(good)
        for _ in range(self.ConsumeIntInRange(0, 4)):
            if bad:
                place = self.ConsumeIntInRange(0, len(bad) - 1)
                new = self.ConsumeBytes(self.one_of([1, 1, 4, 8]))
                bad[place : place + len(new)] = new
        if not self.ConsumeIntInRange(0, 3):
            del bad[self.ConsumeIntInRange(0, len(bad)) :]
        if not self.ConsumeIntInRange(0, 3):
            bad += self.ConsumeBytes(40)
        return bytes(bad)


# --- stores ---

_STORE = _FOLDER / "store"
_SHARDS = [[1, 2, 3], [], [4, 5]]
_FILES = [{"name": "a.jsonl", "bytes": 99, "mtime_ns": 5}, {"name": "b/c.txt", "bytes": 3, "mtime_ns": -1}]
_RANGE = {"file": 0, "start": 0, "stop": 99, "records": 2, "content": "ff" * 16}


def _signed(content: Any) -> bytes:
    """With the right sums and hash, as far as there are any."""
    with contextlib.suppress(Exception):
        for key in ("documents", "tokens"):
            content[key] = sum(shard[key] for shard in content["shards"])
    with contextlib.suppress(Exception), _no_limits():
        content["hash"] = fingerprint(content)
    return _json(content)


def _good_store() -> tuple[dict[str, bytes], Any]:
    make_store(_STORE, _SHARDS)
    manifest = json.loads((_STORE / "manifest.json").read_bytes())
    del manifest["hash"]
    manifest["files"] = _FILES
    manifest["shards"][0]["ranges"] = [_RANGE]
    manifest["shards"][0]["skipped"] = {"not JSON": 3}
    return {path.name: path.read_bytes() for path in _STORE.iterdir()}, manifest


_GOOD_FILES, _GOOD_MANIFEST = _good_store()


def _read_all() -> None:
    """Everything that is done with a store that is there."""
    with contextlib.suppress(StoreError):
        verify_store(_STORE)
    with contextlib.suppress(StoreError):
        store = TokenStore(_STORE)
        manifest = store.manifest
        file_changes(manifest, manifest)
        fingerprint(manifest.recipe)
        for shard in range(len(store.tokens_per_shard)):
            with contextlib.suppress(StoreError):
                tokens = store.tokens(shard)
                assert len(tokens) == store.tokens_per_shard[shard]
                int(tokens.sum())


def manifest_bytes(data: bytes) -> None:
    """The bytes are a manifest."""
    (_STORE / "manifest.json").write_bytes(data)
    _read_all()


def manifest_values(data: bytes) -> None:
    """A sound manifest with other values and a right hash."""
    (_STORE / "manifest.json").write_bytes(_signed(Choices(data).changed(_GOOD_MANIFEST)))
    _read_all()


def store_files(data: bytes) -> None:
    """A sound store with damaged files; what is not named as damaged is as it was."""
    choices = Choices(data)
    bad = {}
    for name, good in _GOOD_FILES.items():
        path = _STORE / name
        bad[name] = choices.damaged(good) if choices.ConsumeBool() else good
        path.write_bytes(bad[name])
    if choices.ConsumeBool():
        manifest = {**_GOOD_MANIFEST, "shards": [dict(shard) for shard in _GOOD_MANIFEST["shards"]]}
        for shard in manifest["shards"]:
            size = len(bad[f"{shard['name']}.bin"])
            shard["tokens"] = size // 2
            if choices.ConsumeBool():
                shard["documents"] = max(0, (len(bad[f"{shard['name']}.idx"]) - 42) // 20)
        (_STORE / "manifest.json").write_bytes(_signed(manifest))
    elif bad["manifest.json"] == _GOOD_FILES["manifest.json"]:
        damaged = {damage.path.name for damage in verify_store(_STORE)}
        assert damaged == {name for name, good in _GOOD_FILES.items() if bad[name] != good}
    _read_all()


# --- plans of packings ---

_PLAN_STORE = _FOLDER / "plans"
_PLAN_STORE.mkdir()
_LENGTHS = [13, 4, 0, 6, 1, 3, 3, 20, 2]
with ShardWriter(_PLAN_STORE, "000000-000", np.dtype("<u2")) as _writer:
    _writer.add(np.arange(sum(_LENGTHS)), _LENGTHS, [(0, number) for number in range(len(_LENGTHS))])
    _PLAN_SHARD = _writer.finish([])
_TOKENS = np.arange(sum(_LENGTHS), dtype=np.uint16)
ensure_plan(_PLAN_STORE, _PLAN_SHARD, "best_fit", 8)
_PLAN = plan_path(_PLAN_STORE, _PLAN_SHARD, "best_fit", 8)
_GOOD_PLAN = _PLAN.read_bytes()


def plans(data: bytes) -> None:
    """A sound plan with damaged bytes, or with other numbers and a right checksum; what opens can be filled."""
    choices = Choices(data)
    if choices.ConsumeBool():
        bad = choices.damaged(_GOOD_PLAN)
    else:
        numbers = np.frombuffer(_GOOD_PLAN, "<i8", offset=88).tolist()
        for _ in range(choices.ConsumeIntInRange(0, 5)):
            change = choices.ConsumeIntInRange(0, 3)
            place = choices.ConsumeIntInRange(0, len(numbers) - 1)
            value = choices.one_of([choices.ConsumeIntInRange(-2, 40), *_NUMBERS])
            numbers[place : place + (change != 1)] = [] if change == 0 else [value]
        body = b"".join((number % 2**64).to_bytes(8, "little") for number in numbers if abs(number) < 2**64)
        counts = [
            choices.ConsumeIntInRange(0, 9) if choices.ConsumeBool() else n
            for n in struct.unpack("<QQ", _GOOD_PLAN[56:72])
        ]
        head = _GOOD_PLAN[:56] + struct.pack("<QQ", *counts) + _GOOD_PLAN[72:80]
        bad = head + xxhash.xxh3_64_intdigest(head + body).to_bytes(8, "little") + body
    _PLAN.unlink()
    _PLAN.write_bytes(bad)
    with contextlib.suppress(StoreError):
        plan = open_plan(_PLAN_STORE, _PLAN_SHARD, "best_fit", 8)
        shard = packed_shard(_TOKENS, plan)
        for number in range(plan.num_samples):
            inputs, labels = np.empty((1, 8), np.int64), np.empty((1, 8), np.int64)
            (count,) = fill_rows(inputs, labels, [(shard, number)])
            assert count == (plan.sample(number)[:, 1] - 1).sum()
            assert (labels[0, :count] == inputs[0, :count] + 1).all()


# --- states and settings ---

_ORDER: dict[str, Any] = {
    "packing": "concat",
    "seed": 3,
    "seq_len": 8,
    "shard_bytes": 0,
    "shuffle_shards": 256,
    "skip": [[3, 9]],
    "sources": [{"name": "web", "recipe": "00" * 8, "data": "11" * 8, "tokens": 100, "samples": 13, "since": 2}],
    "stages": [{"at": 0, "weights": {"code": 2, "web": 1}}, {"at": 4, "weights": "33" * 8}],
    "tokenizer": "22" * 8,
}
_PRESENT = json.loads(describe_order({**_ORDER, "seed": 4}, 12))


def state_values(data: bytes) -> None:
    """A sound state with other values and a right fingerprint, compared with another order."""
    choices = Choices(data)
    order = choices.changed({"format": 1, **_ORDER})
    with contextlib.suppress(Exception), _no_limits():
        content = {key: value for key, value in order.items() if key not in ("fingerprint", "global_batch_size")}
        order = {**order, "fingerprint": fingerprint(content), "global_batch_size": 12}
    state: Any = {"cursor": 5, "order": _json(order).decode()}
    if choices.ConsumeBool():
        state = choices.changed(state)
    _read_state(state)


def state_bytes(data: bytes) -> None:
    """The bytes are the order's text."""
    _read_state({"cursor": 5, "order": data.decode("utf-8", "surrogateescape")})


def _read_state(state: Any) -> None:
    with contextlib.suppress(StateError):
        cursor, order = read_state(state)
        check_order(order, _PRESENT, cursor)


_TABLE: dict[str, Any] = {
    "seed": 1,
    "cache_dir": "c",
    "shuffle_shards": 3,
    "shard_bytes": 0,
    "max_build_minutes": 1.5,
    "add_bos": True,
    "sources": [{"name": "web", "path": "p", "text_field": "t", "on_bad_record": "skip", "add_eos": False}],
    "validation_sources": [{"name": "val", "path": "q", "processor": "a.b:c"}],
    "loading_strategy": "zephon",
    "initial_cursor": 0,
}


def settings(data: bytes) -> None:
    """A sound table of settings with other values."""
    choices = Choices(data)
    choices.extremes = False  # no TOML file has those
    table = choices.changed(_TABLE)
    if isinstance(table, dict):
        with contextlib.suppress(ConfigError):
            data_config_from_table(table, "file.toml", Data)


# --- tokenizers ---

_ASSETS = _FOLDER / "assets"
write_tokenizer(_ASSETS, [3, 2])
_TOKENIZER = json.loads((_ASSETS / "tokenizer.json").read_bytes())
_TOKENIZER["added_tokens"] = [
    {"id": 6, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    | {"special": True}
]
_TOKENIZER_CONFIG = {
    "bos_token": {"content": "<s>", "lstrip": False, "normalized": True},
    "eos_token": "<eos>",
    "added_tokens_decoder": {"7": {"content": "<x>", "special": True}},
}


def tokenizer_values(data: bytes) -> None:
    """A sound tokenizer's folder with other values."""
    choices = Choices(data)
    files = {"tokenizer.json": _TOKENIZER, "tokenizer_config.json": _TOKENIZER_CONFIG}
    for name, good in files.items():
        content = choices.changed(good) if choices.ConsumeBool() else good
        (_ASSETS / name).write_bytes(_json(content))
    _tokenize()


def tokenizer_bytes(data: bytes) -> None:
    """The bytes are a tokenizer.json, and its settings."""
    (_ASSETS / "tokenizer.json").write_bytes(data)
    (_ASSETS / "tokenizer_config.json").write_bytes(data)
    _tokenize()


def _tokenize() -> None:
    with contextlib.suppress(InputError):
        tokenizer = TextTokenizer(_ASSETS)
        assert len(tokenizer.identity) == 16
        _encode(tokenizer)
        for flag in (True, False):
            with contextlib.suppress(ConfigError):
                _encode(tokenizer.with_ends(flag, flag, "here"))


def _encode(tokenizer: TextTokenizer) -> None:
    try:
        tokens, lengths = tokenizer.encode_batch(["0_0 0_1", "", "<eos>"])
        assert len(tokens) == sum(lengths)
    except Exception as error:
        if type(error) is not Exception:  # the library's own error, for which the caller finds the document
            raise


# --- unfinished stores ---

_BUILD = _FOLDER / "build"


def _unfinished() -> tuple[Path, dict[str, bytes], dict[str, bytes]]:
    """The folder of an unfinished store whose shards are all finished; its files; those of the finished one."""
    from zephon_patches.prepare import build

    write_mixed(_BUILD)
    closing = build.Manifest.to_json

    def die(self: Manifest) -> bytes:
        raise KeyboardInterrupt

    build.Manifest.to_json = die  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        open_store(_BUILD)
    build.Manifest.to_json = closing  # type: ignore[method-assign]
    (plan,) = _BUILD.glob("cache/web/*/plan.json")
    before = contents(plan.parent)
    open_store(_BUILD)
    return plan.parent, before, contents(plan.parent)


def unfinished(data: bytes) -> None:
    """The plan or a record of an unfinished store holds other values or damaged bytes; then the build goes on."""
    folder, before, whole = _unfinished_store
    choices = Choices(data)
    shutil.rmtree(folder)
    (folder / "units").mkdir(parents=True)
    names = sorted(name for name in before if name.endswith(".json"))
    bad = choices.one_of(names)
    for name, content in before.items():
        if name == bad and choices.ConsumeBool():
            content = choices.damaged(content)
        elif name == bad:
            content = _json(choices.changed(json.loads(content)))
        (folder / name).write_bytes(content)
    with contextlib.suppress(ZephonError):
        open_store(_BUILD)
        found = contents(folder)
        # A plan that says the same in other words stays as it is.
        assert json.loads(found.pop("plan.json")) == json.loads(whole["plan.json"])
        assert found == {name: content for name, content in whole.items() if name != "plan.json"}


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        manifest_bytes,
        manifest_values,
        store_files,
        state_bytes,
        state_values,
        plans,
        settings,
        tokenizer_bytes,
        tokenizer_values,
        unfinished,
    )
}


def _seeds(name: str) -> list[bytes]:
    return {
        "manifest_bytes": [_GOOD_FILES["manifest.json"], _signed(dict(_GOOD_MANIFEST))],
        "state_bytes": [describe_order(_ORDER, 12).encode()],
        "tokenizer_bytes": [json.dumps(_TOKENIZER).encode(), json.dumps(_TOKENIZER_CONFIG).encode()],
    }.get(name, [])


@contextlib.contextmanager
def _corpus(name: str) -> Iterator[str]:
    folder = _FOLDER / "corpus"
    folder.mkdir()
    chance = np.random.Generator(np.random.PCG64(0))
    for number, seed in enumerate([*_seeds(name), *(chance.bytes(200) for _ in range(20))]):
        (folder / str(number)).write_bytes(seed)
    yield str(folder)


def _guard(allowed: tuple[str, ...]) -> None:
    """No file outside may be opened or looked at; what Python needs for itself may."""
    stat = os.stat

    def check(path: Any) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            name = os.path.abspath(os.fsdecode(path))
            if not name.startswith(allowed):
                print(f"looked outside: {name}", file=sys.stderr)
                os.abort()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            check(arguments[0])

    def guarded(path: Any, *args: Any, **keywords: Any) -> os.stat_result:
        check(path)
        return stat(path, *args, **keywords)

    sys.addaudithook(watch)
    os.stat = guarded  # type: ignore[assignment]


if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"target {name!r}: expected one of {', '.join(TARGETS)}")
    logging.disable(logging.CRITICAL)
    if name == "unfinished":
        _unfinished_store = _unfinished()
    with _corpus(name) as corpus:
        python = (sys.prefix, sys.base_prefix, *(p for p in sys.path if p and "-packages" in p), os.getcwd())
        _guard((str(_FOLDER), "/proc/", "/dev/null", *python))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM_BYTES, resource.RLIM_INFINITY))
        # libFuzzer ends the process itself, so nothing after this line runs; the folder lies in memory.
        atheris.Setup([sys.argv[0], "-max_len=4096", *sys.argv[1:], corpus], TARGETS[name])
        atheris.Fuzz()
