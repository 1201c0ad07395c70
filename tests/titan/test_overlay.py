"""The overlay: which modules are this fork's, and that the others and the names in them are upstream's."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import linecache
import pickle
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from zephon_patches.titan import overlay

REPOSITORY = Path(__file__).resolve().parents[2]
OVERLAY = REPOSITORY / "torchtitan"
UPSTREAM = overlay.upstream_folder()


def module_names(root: Path) -> list[str]:
    """Names of all modules under a ``torchtitan`` folder, apart from those whose packages import optional ones."""
    names = []
    for path in sorted(root.rglob("*.py")):
        parts = ("torchtitan", *path.relative_to(root).with_suffix("").parts)
        if not {"experiments", "flux", "deepep"}.intersection(parts):
            names.append(".".join(parts).removesuffix(".__init__"))
    return names


REPLACED = module_names(OVERLAY)


def origin(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def test_the_installed_release_is_not_the_overlay():
    assert UPSTREAM != OVERLAY
    assert (UPSTREAM / "train.py").is_file()


def test_exactly_these_modules_are_replaced():
    assert REPLACED == [
        "torchtitan",
        "torchtitan.components.checkpoint",
        "torchtitan.components.dataloader",
        "torchtitan.components.tokenizer",
        "torchtitan.config",
        "torchtitan.config.job_config",
        "torchtitan.config.manager",
        "torchtitan.hf_datasets",
        "torchtitan.hf_datasets.text_datasets",
    ]


@pytest.mark.parametrize("name", module_names(UPSTREAM))
def test_a_module_is_the_overlays_if_it_is_there_and_else_upstreams(name):
    assert origin(name).is_relative_to(OVERLAY if name in REPLACED else UPSTREAM)


def test_no_package_of_the_overlay_hides_upstreams_modules():
    # A folder needs an __init__.py exactly where upstream has one: with one too many, upstream's modules are not
    # found; with one too few, the overlay's are not.
    for folder in [OVERLAY, *OVERLAY.rglob("*")]:
        if folder.is_dir() and folder.name != "__pycache__":
            upstream = UPSTREAM / folder.relative_to(OVERLAY)
            assert (folder / "__init__.py").exists() == (upstream / "__init__.py").exists(), folder


def test_the_version_is_upstreams():
    import torchtitan

    assert torchtitan.__version__ == "0.2.2"
    assert "torchtitan.components.quantization" in sys.modules


def test_there_is_one_class_of_each_name():
    import torchtitan.config
    import torchtitan.config.job_config
    import torchtitan.config.manager
    from torchtitan.components import checkpoint, dataloader
    from torchtitan.hf_datasets import text_datasets
    from torchtitan.models import llama3

    assert torchtitan.config.JobConfig is torchtitan.config.job_config.JobConfig is torchtitan.config.manager.JobConfig
    assert torchtitan.config.ConfigManager is torchtitan.config.manager.ConfigManager
    assert text_datasets.JobConfig is torchtitan.config.JobConfig
    assert checkpoint.BaseDataLoader is dataloader.BaseDataLoader
    assert llama3.build_text_dataloader is text_datasets.build_text_dataloader


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchtitan.config.job_config", "JobConfig"),
        ("torchtitan.config.job_config", "Training"),
        ("torchtitan.config.manager", "ConfigManager"),
        ("torchtitan.components.checkpoint", "CheckpointManager"),
        ("torchtitan.components.dataloader", "ParallelAwareDataloader"),
        ("torchtitan.hf_datasets", "DatasetConfig"),
        ("torchtitan.hf_datasets.text_datasets", "build_text_dataloader"),
    ],
)
def test_names_say_where_they_can_be_found(module, name):
    thing = getattr(importlib.import_module(module), name)
    assert (thing.__module__, thing.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(thing)) is thing


def test_a_config_can_be_pickled():
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.data.seed = 5
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.to_dict()["data"]["seed"] == 5


def test_upstreams_code_reads_the_modules_own_names():
    # What a test patches in the module is what the code sees: there is no second module behind it.
    for name in ("torchtitan.components.checkpoint", "torchtitan.hf_datasets.text_datasets"):
        module = importlib.import_module(name)
        functions = [
            function
            for cls in vars(module).values()
            if inspect.isclass(cls) and cls.__module__ == name
            for function in vars(cls).values()
            if inspect.isfunction(function) and function.__module__ == name
        ]
        assert functions
        for function in functions:
            assert inspect.unwrap(function).__globals__ is vars(module) or function.__name__ in ("save", "load")


def test_upstreams_code_keeps_its_file_name_in_tracebacks():
    from torchtitan.hf_datasets import text_datasets

    with pytest.raises(ValueError, match="nonesuch") as caught:
        text_datasets._validate_dataset("nonesuch")
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert frame.filename == str(UPSTREAM / "hf_datasets" / "text_datasets.py")
    assert frame.line == linecache.getline(frame.filename, frame.lineno).strip() != ""


def test_sources_can_be_inspected():
    from torchtitan.components import checkpoint
    from torchtitan.config import Training
    from torchtitan.hf_datasets import text_datasets

    assert inspect.getsource(Training).startswith("@dataclass\nclass Training")
    assert inspect.getsource(checkpoint.CheckpointManager).startswith("class CheckpointManager")
    assert Path(inspect.getfile(text_datasets.build_text_dataloader)).is_relative_to(OVERLAY)


def test_our_loader_counts_as_a_loader_of_torchtitan():
    from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
    from zephon_patches.loader.loader import Loader

    assert issubclass(Loader, BaseDataLoader)
    assert not issubclass(Loader, ParallelAwareDataloader)


# The checkpoint manager's hook


@pytest.fixture
def calls(monkeypatch):
    from zephon_patches.titan import hook

    calls: list[tuple] = []

    def after_step(manager, step: int, last_step: bool) -> bool:
        calls.append(("after_step", step, last_step))
        return last_step or step == 5

    monkeypatch.setattr(hook, "after_step", after_step)
    monkeypatch.setattr(hook, "after_load", lambda manager, loaded: calls.append(("after_load", loaded)))
    monkeypatch.setattr(hook, "attach", lambda manager: calls.append(("attach",)))
    monkeypatch.setattr(hook, "before_load", lambda manager, *rest: calls.append(("before_load", *rest)))
    monkeypatch.setattr(hook, "after_save", lambda manager: calls.append(("after_save",)))

    @contextmanager
    def unfinished_are_not_counted(manager):
        calls.append(("not counted",))
        yield
        calls.append(("counted",))

    monkeypatch.setattr(hook, "unfinished_are_not_counted", unfinished_are_not_counted)
    return calls


def hooked_manager(calls):
    class Manager:
        def __init__(self) -> None:
            calls.append(("init",))

        def dcp_load(self, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
            calls.append(("dcp_load", checkpoint_id, from_hf, from_quantized))

        def save(self, curr_step: int, last_step: bool = False) -> None:
            """Saves."""
            calls.append(("save", curr_step, last_step))
            if curr_step == 4:
                self._purge_stale_checkpoints()

        def _purge_stale_checkpoints(self) -> None:
            calls.append(("purge",))

        def load(self, step: int = -1) -> bool:
            calls.append(("load", step))
            self.dcp_load({}, checkpoint_id="c", from_hf=False, from_quantized=False)
            return step > 0

    overlay.hook_checkpoints(Manager)
    return Manager


def test_the_hook_runs_after_init_around_a_save_and_a_load_and_where_checkpoints_are_removed(calls):
    manager = hooked_manager(calls)()
    manager.save(3)
    manager.save(curr_step=4, last_step=True)
    manager.save(5, False)  # which the hook makes the last one
    assert manager.load(step=7) is True
    assert manager.load() is False
    around_dcp = [("before_load", {}, "c", False), ("dcp_load", "c", False, False)]
    assert calls == [
        ("init",),
        ("attach",),
        ("after_step", 3, False),
        ("save", 3, False),
        ("after_save",),
        ("after_step", 4, True),
        ("save", 4, True),
        ("not counted",),
        ("purge",),
        ("counted",),
        ("after_save",),
        ("after_step", 5, False),
        ("save", 5, True),
        ("after_save",),
        ("load", 7),
        *around_dcp,
        ("after_load", True),
        ("load", -1),
        *around_dcp,
        ("after_load", False),
    ]


def test_nothing_is_saved_if_the_hook_refuses(calls, monkeypatch):
    from zephon_patches.titan import hook

    def refuse(manager, step, last_step):
        raise RuntimeError("half a step")

    monkeypatch.setattr(hook, "after_step", refuse)
    with pytest.raises(RuntimeError, match="half a step"):
        hooked_manager(calls)().save(1)
    assert calls == [("init",), ("attach",)]


def test_the_checkpoint_manager_keeps_its_signatures():
    from torchtitan.components.checkpoint import CheckpointManager

    assert str(inspect.signature(CheckpointManager.save)) == "(self, curr_step: int, last_step: bool = False) -> None"
    assert list(inspect.signature(CheckpointManager.load).parameters) == ["self", "step"]
    assert CheckpointManager.save.__doc__ and CheckpointManager.load.__doc__


# The choice of the loader


def choose(monkeypatch, strategy: str, validation: bool = False) -> str:
    from torchtitan.config import JobConfig
    from torchtitan.hf_datasets import text_datasets
    from zephon_patches.titan import build

    monkeypatch.setattr(
        text_datasets,
        "_upstream",
        SimpleNamespace(
            build_text_dataloader=lambda *args: ("stock", *args),
            build_text_validation_dataloader=lambda *args: ("stock validation", *args),
            DATASETS=text_datasets.DATASETS,
            logger=text_datasets.logger,
        ),
    )
    monkeypatch.setattr(build, "build_training_loader", lambda **kwargs: ("zephon", kwargs))
    monkeypatch.setattr(build, "build_validation_loader", lambda **kwargs: ("zephon validation", kwargs))
    config = JobConfig()
    config.data.loading_strategy = strategy
    build_loader = text_datasets.build_text_validation_dataloader if validation else text_datasets.build_text_dataloader
    return build_loader(dp_world_size=4, dp_rank=1, tokenizer="tokenizer", job_config=config)


def test_the_strategy_chooses_the_training_loader(monkeypatch):
    from torchtitan.hf_datasets.text_datasets import DATASETS

    assert choose(monkeypatch, "stock")[:4] == ("stock", 4, 1, "tokenizer")
    name, arguments = choose(monkeypatch, "zephon")
    assert name == "zephon"
    config = arguments.pop("job_config")
    assert config.data.loading_strategy == "zephon"
    assert arguments == {
        "dp_world_size": 4,
        "dp_rank": 1,
        "tokenizer": "tokenizer",
        "infinite": True,
        "datasets": DATASETS,
    }
    assert arguments["datasets"] is DATASETS, "what is registered later must be seen"


def test_the_strategy_chooses_the_validation_loader(monkeypatch):
    assert choose(monkeypatch, "stock", validation=True)[:4] == ("stock validation", 4, 1, "tokenizer")
    name, arguments = choose(monkeypatch, "zephon", validation=True)
    assert name == "zephon validation"
    assert (arguments["dp_world_size"], arguments["dp_rank"]) == (4, 1)


def test_the_training_functions_have_upstreams_signatures():
    from torchtitan.hf_datasets import text_datasets

    for name in ("build_text_dataloader", "build_text_validation_dataloader"):
        ours = inspect.signature(getattr(text_datasets, name)).parameters
        theirs = inspect.signature(getattr(text_datasets._upstream, name)).parameters
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in theirs.values()
        ]


# Finding the release


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Pretends that a release is installed in ``tmp_path``."""

    def install(version: str, url: str | None = None, files: bool = True) -> Path:
        info = tmp_path / f"torchtitan-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchtitan\nVersion: {version}\n")
        if url is not None:
            (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
        if files:
            make_package(tmp_path)
        found = importlib.metadata.PathDistribution(info)
        monkeypatch.setattr(overlay, "distribution", lambda name: found)
        return tmp_path

    overlay.upstream_folder.cache_clear()
    yield install
    overlay.upstream_folder.cache_clear()


def make_package(root: Path) -> Path:
    package = root / "torchtitan"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "train.py").touch()
    return package


@pytest.mark.parametrize("version", ["0.2.2", "0.2.2+local"])
def test_the_release_is_found_wherever_it_is_installed(installed, version):
    assert overlay.upstream_folder() == UPSTREAM
    overlay.upstream_folder.cache_clear()
    root = installed(version)
    assert overlay.upstream_folder() == root / "torchtitan"


def test_a_checkout_that_is_installed_as_editable_is_found(installed, tmp_path):
    package = make_package(tmp_path / "a checkout")
    installed("0.2.2", url=package.parent.as_uri(), files=False)
    assert overlay.upstream_folder() == package


@pytest.mark.parametrize("version", ["0.2.1", "0.3.0", "0.2.20"])
def test_another_release_is_refused_by_name(installed, version):
    installed(version)
    with pytest.raises(overlay.UpstreamError, match=rf"torchtitan {version} is installed.*torchtitan==0\.2\.2"):
        overlay.upstream_folder()


def test_a_missing_release_is_refused_with_the_way_to_install_it(installed, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(overlay, "distribution", missing)
    with pytest.raises(overlay.UpstreamError, match=r"not installed.*pip install torchtitan==0\.2\.2"):
        overlay.upstream_folder()


def test_a_release_without_its_files_is_refused_with_the_place(installed, tmp_path):
    installed("0.2.2", files=False)
    with pytest.raises(overlay.UpstreamError, match="files are not at") as caught:
        overlay.upstream_folder()
    assert str(tmp_path / "torchtitan") in str(caught.value)


def test_a_module_that_the_release_has_not_is_an_error():
    spec = importlib.util.spec_from_loader("torchtitan.components.nonesuch", loader=None)
    with pytest.raises(overlay.UpstreamError, match=r"torchtitan\.components\.nonesuch"):
        overlay.run_upstream({"__name__": spec.name, "__spec__": spec})


def test_a_module_can_be_run_as_a_program():
    result = subprocess.run(
        [sys.executable, "-m", "torchtitan.config.manager", "--data.seed", "11"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert result.returncode == 0, result.stderr
    assert "seed=11" in result.stdout
