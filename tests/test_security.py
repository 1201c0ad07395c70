"""Nothing of ours runs what it reads: no pickle, no evaluated text, no shell, but for what is listed with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("zephon_patches", "torchtitan", "scripts")
    for path in (REPOSITORY / folder).rglob("*.py")
)

# Modules whose readers run what a file says, or that fetch from elsewhere.
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code", "pty"}
MODULES |= {"urllib.request", "http.client", "ftplib", "telnetlib", "requests", "xmlrpc"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "tempfile.mktemp"}
CALLS |= {"importlib.import_module", "import_module", "yaml.load", "torch.load", "np.load", "numpy.load"}
CALLS |= {"Environment", "jinja2.Environment", "Template", "jinja2.Template"}

ALLOWED = {
    (
        "zephon_patches/cli/__main__.py",
        "importlib.import_module",
    ): "imports the command that is asked for, of a fixed list",
    (
        "zephon_patches/loader/pool.py",
        "pickle",
    ): "talks to worker processes that this process starts, by their own socket",
    ("zephon_patches/loader/serve.py", "pickle"): "talks to the process that started this one, by its own socket",
    ("zephon_patches/prepare/build.py", "pickle"): "asks whether a job can be sent to worker processes; reads none",
    ("zephon_patches/prepare/parallel.py", "pickle"): "sends a job to worker processes that this process starts",
    (
        "zephon_patches/prepare/processors.py",
        "importlib.import_module",
    ): "a processor is a function that a config names",
    ("zephon_patches/titan/overlay.py", "exec"): "runs the installed release's own source in the overlay's modules",
    ("zephon_patches/titan/overlay.py", "urllib.request"): "turns a file:// address into a path; fetches nothing",
}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def _value(call: ast.Call, key: str) -> object:
    found = [keyword.value for keyword in call.keywords if keyword.arg == key]
    return found[0].value if found and isinstance(found[0], ast.Constant) else None


def _has(call: ast.Call, key: str) -> bool:
    return any(keyword.arg == key for keyword in call.keywords)


def dangers(source: str) -> Iterator[str]:
    """What a file imports or calls that may run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            yield from (name for name in names if name in MODULES or name.partition(".")[0] in MODULES)
            yield from (name for name in names if name in CALLS)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name == "torch.load" and _value(node, "weights_only") is True:
                continue
            if name in ("np.load", "numpy.load") and _value(node, "allow_pickle") is not True:
                continue
            if name in CALLS:
                yield name
            if any(
                k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
                for k in node.keywords
            ):
                yield f"{name}(shell=True)"


@pytest.mark.parametrize("file", FILES)
def test_no_file_runs_what_it_reads(file):
    found = {what for what in dangers((REPOSITORY / file).read_text(encoding="utf-8")) if (file, what) not in ALLOWED}
    assert not found, f"{file}: {found}: find another way, or list it with a reason"


def test_what_is_allowed_is_there():
    for file, what in ALLOWED:
        assert what in dangers((REPOSITORY / file).read_text(encoding="utf-8")), f"{file} has no {what} any more"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import os\nos.system('ls')", "os.system"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("import torch\ntorch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=False)", "torch.load"),
        ("torch.load(f, weights_only=flag)", "torch.load"),
        ("np.load(f, allow_pickle=True)", "np.load"),
        ("subprocess.run(line, shell=True)", "subprocess.run(shell=True)"),
        ("subprocess.run(line, shell=flag)", "subprocess.run(shell=True)"),
        ("from importlib import import_module\nimport_module(name)", "import_module"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("import yaml", "yaml"),
        ("jinja2.Environment()", "jinja2.Environment"),
    ],
)
def test_the_look_finds_each_kind(source, what):
    assert what in set(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(f, weights_only=True)",
        "np.load(f)",
        "subprocess.run(line, shell=False)",
        "re.compile(x)",
        "model.eval()",
    ],
)
def test_the_look_lets_the_harmless_pass(source):
    assert set(dangers(source)) == set()
