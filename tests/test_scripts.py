"""The shell scripts and the demo data, without installing anything: a stub stands for python3 and notes its calls."""

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from scripts import make_demo_data

REPOSITORY = Path(__file__).resolve().parents[1]

SCRIPTS = [
    "run_train.sh",
    "scripts/elastic_demo.sh",
    "scripts/elastic_nodes.sh",
    "scripts/install.sh",
    "scripts/num_gpus.sh",
    "scripts/multinode_trainer.slurm",
    "scripts/test.sh",
    "scripts/upstream_tests.sh",
]

pytestmark = pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="the scripts are bash's")

# Plays python3: notes its arguments, working folder and a part of its environment; makes "virtual environments" that
# hold a copy of itself; has the distributions that the file `has` beside it lists; fails to install where `broken` is.
STUB = """#!/bin/bash
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
note() { echo "$*" >>"$STUB_LOG"; }
case $1 in
    -)
        shift
        for name; do grep -qx "$name" "$here/has" 2>/dev/null || exit 1; done
        [ "$PWD" = / ] && [ -z "${PYTHONPATH:-}" ] || exit 1
        echo "$here/$(basename "$0")"
        ;;
    -c)
        case $2 in
            *version_info*) echo "${STUB_VERSION:-3.11}" ;;
            *sched_getaffinity*) echo "${STUB_CORES:-8}" ;;
        esac
        ;;
    -m)
        case "$2 $3" in
            "pip --version") [ -e "$here/pip" ] ;;
            "pip install")
                note "pip $*"
                sleep "${STUB_PIP_SECONDS:-0}"
                [ ! -e "$STUB_BROKEN" ] || exit 1
                ;;
            "venv --clear")
                note "venv $4"
                mkdir -p "$4/bin"
                cp "${BASH_SOURCE[0]}" "$4/bin/python"
                touch "$4/bin/pip"
                ;;
            *)
                note "run $* | in $PWD | NGPU=${NGPU:-} LOG_RANK=${LOG_RANK:-} OMP=${OMP_NUM_THREADS:-}" \\
                    "LOCAL_RANK=${LOCAL_RANK:-} PYTHONPATH=${PYTHONPATH:-}"
                case "$2" in "${STUB_FAILS:-none}") exit 1 ;; esac
                ;;
        esac
        ;;
    *) note "script $*" ;;
esac
"""


class Setting:
    """A copy of the scripts in a folder of its own, and a ``PATH`` with stubs."""

    def __init__(self, root: Path):
        self.repo = root / "the repo"
        self.log = root / "log"
        self.broken = root / "broken"
        self.bin = root / "bin"
        self.bin.mkdir()
        self.stub("python3", STUB)
        (self.repo / "scripts").mkdir(parents=True)
        for name in (*SCRIPTS, "pyproject.toml", "constraints.txt"):
            shutil.copy(REPOSITORY / name, self.repo / name)
        shutil.copytree(REPOSITORY / "train_configs", self.repo / "train_configs")
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(root),
            "STUB_LOG": str(self.log),
            "STUB_BROKEN": str(self.broken),
            "CUDA_VISIBLE_DEVICES": "",
        }

    def stub(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def has(self, *distributions: str) -> None:
        (self.bin / "has").write_text("".join(f"{name}\n" for name in distributions))

    def run(self, script: str, *args: str, cwd: Path | None = None, **environment: str):
        return subprocess.run(
            ["bash", str(self.repo / script), *args],
            cwd=cwd or self.repo,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, kind: str = "") -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if line.startswith(kind)]

    @property
    def venv_python(self) -> str:
        return str(self.repo / ".venv" / "bin" / "python")


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path)


# install.sh


def test_an_active_environment_with_the_package_is_used_as_it_is(setting):
    setting.has("torchtitan-zephon")
    result = setting.run("scripts/install.sh")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{setting.bin}/python3\n", "")
    assert setting.calls() == []
    assert not (setting.repo / ".venv").exists()


def test_the_source_folder_on_the_path_is_not_taken_for_an_installation(setting):
    # The stub answers only when asked from / and without PYTHONPATH.
    setting.has("torchtitan-zephon")
    result = setting.run("scripts/install.sh", PYTHONPATH=str(setting.repo))
    assert result.stdout == f"{setting.bin}/python3\n"


def test_a_first_start_installs_and_a_second_one_is_quiet(setting):
    first = setting.run("scripts/install.sh")
    assert (first.returncode, first.stdout) == (0, f"{setting.venv_python}\n")
    assert "installing into" in first.stderr
    calls = setting.calls()
    assert [call.split()[0] for call in calls] == ["venv", "pip"]
    assert f"-c {setting.repo}/constraints.txt -e {setting.repo}" in calls[1]
    assert not calls[1].endswith("[dev]")

    second = setting.run("scripts/install.sh")
    assert (second.returncode, second.stdout, second.stderr) == (0, f"{setting.venv_python}\n", "")
    assert setting.calls() == []


def test_the_tests_tools_are_added_once_and_kept(setting):
    setting.run("scripts/install.sh")
    setting.calls()
    assert setting.run("scripts/install.sh", "dev").returncode == 0
    assert [call.endswith("[dev]") for call in setting.calls()] == [True], "the environment itself stays"
    setting.run("scripts/install.sh", "dev")
    setting.run("scripts/install.sh")
    assert setting.calls() == []
    # A change of the pins brings both up to date.
    with (setting.repo / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    setting.run("scripts/install.sh")
    assert [call.endswith("[dev]") for call in setting.calls()] == [True]
    setting.run("scripts/install.sh", "dev")
    assert setting.calls() == []


def test_each_extra_is_added_to_those_that_are_there(setting):
    for extra, installed in (("plot", "[plot]"), ("dev", "[dev,plot]")):
        assert setting.run("scripts/install.sh", extra).stdout == f"{setting.venv_python}\n"
        assert [call.endswith(installed) for call in setting.calls("pip")] == [True]
    for extra in ("", "dev", "plot"):
        assert setting.run("scripts/install.sh", *extra.split()).returncode == 0
    assert setting.calls() == []


def test_an_active_environment_without_the_tests_tools_does_not_do_for_the_tests(setting):
    setting.has("torchtitan-zephon", "pytest")
    assert setting.run("scripts/install.sh", "dev").stdout == f"{setting.venv_python}\n"
    setting.has(
        "torchtitan-zephon", "hatchling", "hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"
    )
    assert setting.run("scripts/install.sh", "dev").stdout == f"{setting.bin}/python3\n"


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_other_requirements_are_installed_into_the_same_environment(setting, file):
    setting.run("scripts/install.sh")
    setting.calls()
    with (setting.repo / file).open("a") as out:
        out.write("\n# changed\n")
    setting.run("scripts/install.sh")
    assert [call.split()[0] for call in setting.calls()] == ["pip"]


def test_a_failed_installation_is_tried_again(setting):
    setting.broken.touch()
    result = setting.run("scripts/install.sh")
    assert result.returncode != 0
    assert result.stdout == ""
    assert "installation failed" in result.stderr
    setting.calls()
    setting.broken.unlink()
    assert setting.run("scripts/install.sh").stdout == f"{setting.venv_python}\n"
    assert [call.split()[0] for call in setting.calls()] == ["pip"]


def test_an_interrupted_installation_is_not_taken_for_a_whole_one(setting):
    process = subprocess.Popen(
        ["bash", str(setting.repo / "scripts" / "install.sh")],
        env={**setting.environment, "STUB_PIP_SECONDS": "30"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    while "pip" not in (setting.log.read_text() if setting.log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait()
    setting.calls()
    assert setting.run("scripts/install.sh").stdout == f"{setting.venv_python}\n"
    assert [call.split()[0] for call in setting.calls()] == ["pip"]


def test_half_a_virtual_environment_is_made_anew(setting):
    (setting.repo / ".venv" / "bin").mkdir(parents=True)
    (setting.repo / ".venv" / "bin" / "python").write_text(STUB)
    (setting.repo / ".venv" / "bin" / "python").chmod(0o755)
    setting.run("scripts/install.sh")
    assert [call.split()[0] for call in setting.calls()] == ["venv", "pip"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock two starts are not kept apart")
def test_two_starts_at_once_install_once(setting):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(setting.run("scripts/install.sh", STUB_PIP_SECONDS="1")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.stdout for result in results] == [f"{setting.venv_python}\n"] * 3
    assert len(setting.calls("pip")) == 1
    assert sum("waiting" in result.stderr for result in results) == 2


def test_a_missing_python_is_said(setting):
    result = setting.run("scripts/install.sh", PYTHON="/nowhere/python3")
    assert result.returncode == 1
    assert "/nowhere/python3 is not found" in result.stderr
    assert "3.10" in result.stderr


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9"])
def test_a_python_that_is_too_old_is_said(setting, version):
    result = setting.run("scripts/install.sh", STUB_VERSION=version)
    assert result.returncode == 1
    assert f"is Python {version}" in result.stderr
    assert setting.calls() == []


@pytest.mark.parametrize("version", ["3.10", "3.13", "3.20"])
def test_newer_pythons_are_taken(setting, version):
    assert setting.run("scripts/install.sh", STUB_VERSION=version).returncode == 0


def test_a_python_without_venv_is_said(setting):
    setting.stub("python3", STUB.replace('note "venv $4"', "exit 1"))
    result = setting.run("scripts/install.sh")
    assert result.returncode == 1
    assert "venv" in result.stderr


def test_an_unknown_extra_is_refused(setting):
    assert "unknown extra 'docs'" in setting.run("scripts/install.sh", "docs").stderr


# run_train.sh


@pytest.fixture
def train(setting):
    """Runs ``run_train.sh`` in an environment that has the package; gives the calls."""
    setting.has("torchtitan-zephon")

    def train(*args: str, **kwargs) -> list[str]:
        result = setting.run("run_train.sh", *args, **kwargs)
        assert result.returncode == 0, result.stderr
        return setting.calls()

    return train


def test_a_plain_start_trains_the_debug_model_on_two_cpu_processes(setting, train):
    demo, run = train()
    assert demo == "script scripts/make_demo_data.py"
    assert "-m zephon_patches.launch --nproc_per_node 2 " in run
    assert "--rdzv_backend c10d --rdzv_endpoint localhost:0 --local-ranks-filter 0 --role rank --tee 3" in run
    assert f"-m torchtitan.train --job.config_file {setting.repo}/train_configs/llama3_debug.toml |" in run
    assert f"PYTHONPATH={setting.repo}" in run
    assert "OMP=4" in run, "8 cores for 2 processes"


def test_it_becomes_the_process_that_starts_the_ranks(setting, train):
    """So a signal to it, of any kind, is one to torchrun, and its status is torchrun's."""
    setting.stub("python3", STUB.replace('note "run $*', 'note "run $$ $*'))
    started = subprocess.Popen(["bash", str(setting.repo / "run_train.sh")], env=setting.environment)
    assert started.wait(60) == 0
    assert setting.calls("run")[-1].startswith(f"run {started.pid} -m zephon_patches.launch ")


def test_the_time_that_ranks_have_to_end_is_set_and_can_be(setting, train):
    setting.stub("python3", STUB.replace('note "run $*', 'note "run $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*'))
    assert train()[-1].startswith("run 30 -m zephon_patches.launch ")
    assert train(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120")[-1].startswith("run 120 -m zephon_patches.launch ")


def test_upstreams_variables_are_kept(train):
    _, run = train("--training.steps", "7", NGPU="3", LOG_RANK="0,1", TRAIN_FILE="my.trainer", PYTHONPATH="/mine")
    assert "--nproc_per_node 3 " in run
    assert "--local-ranks-filter 0,1 " in run
    assert "-m my.trainer " in run
    assert "--training.steps 7 |" in run
    assert run.endswith(":/mine")
    assert "LOG_RANK=0,1" in run, "the trainer reads it too"


def test_arguments_arrive_as_they_are(setting, train):
    setting.stub("python3", STUB.replace('note "run $*', 'note "run $(printf "<%s>" "$@")'))
    assert "<--job.description><two  words *>" in train("--job.description", "two  words *")[-1]


@pytest.mark.parametrize(("ngpu", "cores", "threads"), [("1", "8", "8"), ("3", "8", "2"), ("16", "8", "1")])
def test_cpu_processes_share_the_cores(train, ngpu, cores, threads):
    assert f"OMP={threads} " in train(NGPU=ngpu, STUB_CORES=cores)[-1]
    assert "OMP=5 " in train(NGPU=ngpu, STUB_CORES=cores, OMP_NUM_THREADS="5")[-1]


def test_all_gpus_are_used_and_their_processes_keep_their_threads(setting, train):
    setting.stub("nvidia-smi", '#!/bin/bash\nfor i in 0 1 2 3; do echo "GPU $i: X (UUID: GPU-$i)"; done\n')
    del setting.environment["CUDA_VISIBLE_DEVICES"]
    run = train()[-1]
    assert "--nproc_per_node 4 " in run
    assert "OMP= " in run
    assert "--nproc_per_node 2 " in train(CUDA_VISIBLE_DEVICES="1,3")[-1]
    assert "--nproc_per_node 1 " in train(NGPU="1")[-1]


def test_a_config_of_the_repository_starts_there_from_any_folder(setting, train, tmp_path):
    for config in ("train_configs/llama3_debug.toml", str(setting.repo / "train_configs" / "llama3_debug.toml")):
        run = train(CONFIG_FILE=config, cwd=tmp_path)[-1]
        assert f"| in {setting.repo} |" in run
        assert f"--job.config_file {setting.repo}/train_configs/llama3_debug.toml" in run


def test_another_config_starts_in_the_callers_folder(train, tmp_path):
    (tmp_path / "mine.toml").write_text('path = "./demo_data/x"')
    calls = train(CONFIG_FILE="mine.toml", cwd=tmp_path)
    assert len(calls) == 1, "its demo_data is not the repository's"
    assert f"--job.config_file {tmp_path}/mine.toml" in calls[0]
    assert f"| in {tmp_path} |" in calls[0]


def test_a_config_of_the_repository_without_demo_data_makes_none(setting, train):
    (setting.repo / "train_configs" / "other.toml").write_text("")
    assert len(train(CONFIG_FILE="train_configs/other.toml")) == 1


def test_a_missing_config_is_said(setting):
    result = setting.run("run_train.sh", CONFIG_FILE="nope.toml")
    assert result.returncode == 1
    assert "CONFIG_FILE nope.toml" in result.stderr
    assert setting.calls() == []


@pytest.mark.parametrize("ngpu", ["0", "-1", "two", "1.5", "08"])
def test_a_wrong_number_of_processes_is_said(setting, ngpu):
    result = setting.run("run_train.sh", NGPU=ngpu)
    assert result.returncode == 1
    assert f"NGPU is '{ngpu}'" in result.stderr


@pytest.mark.parametrize("mode", ["fake_backend", "local_tensor"])
def test_a_comm_mode_plays_all_ranks_in_one_process(setting, train, mode):
    run = train("--training.steps", "9", COMM_MODE=mode, NGPU="64")[-1]
    assert run.startswith("run -m torchtitan.train --job.config_file ")
    assert f"--training.steps 9 --comm.mode={mode} --training.steps 1 |" in run
    assert "NGPU=64 " in run
    assert "LOCAL_RANK=0 " in run


@pytest.mark.parametrize("spelling", ["--help", "-h"])
def test_help_runs_in_one_process_and_makes_nothing(train, spelling):
    calls = train("--training.steps", "3", spelling)
    assert len(calls) == 1
    assert calls[0].startswith("run -m torchtitan.train --job.config_file ")
    assert "--help |" in calls[0]


# test.sh


@pytest.fixture
def tools(setting):
    setting.has(
        "torchtitan-zephon", "hatchling", "hypothesis", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "ruff"
    )
    return setting


def test_the_test_script_checks_style_types_and_tests(tools, tmp_path):
    assert tools.run("scripts/test.sh", cwd=tmp_path).returncode == 0
    calls = tools.calls()
    assert [call.split(" |")[0] for call in calls] == [
        "run -m ruff check .",
        "run -m ruff format --check .",
        "run -m mypy",
        "run -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder",
    ]
    assert all(f"in {tools.repo} |" in call and f"PYTHONPATH={tools.repo}" in call for call in calls)


@pytest.mark.parametrize("tool", ["ruff", "mypy", "pytest"])
def test_a_failed_check_fails_the_script_after_the_others_ran(tools, tool):
    result = tools.run("scripts/test.sh", STUB_FAILS=tool)
    assert result.returncode == 1
    assert f"failed: {tool}" in result.stderr
    assert len(tools.calls()) == 4


def test_arguments_go_to_pytest_alone(tools):
    assert tools.run("scripts/test.sh", "tests/order", "-k", "a or b").returncode == 0
    assert [call.split(" |")[0] for call in tools.calls()] == ["run -m pytest tests/order -k a or b"]


def test_ci_runs_the_test_script():
    assert "scripts/test.sh" in (REPOSITORY / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", [*SCRIPTS, ".ci/run"])
def test_scripts_can_be_executed_and_parsed(name):
    assert os.access(REPOSITORY / name, os.X_OK)
    assert subprocess.run(["bash", "-n", str(REPOSITORY / name)]).returncode == 0


# multinode_trainer.slurm


@pytest.fixture
def slurm(setting):
    """Runs the job's script as Slurm does: a copy of it in another folder, on the first machine."""
    setting.has("torchtitan-zephon")
    setting.stub("srun", '#!/bin/bash\n[ "$1" = --kill-on-bad-exit=1 ] || exit 9\nshift\nexec "$@"\n')
    setting.stub("scontrol", '#!/bin/bash\necho "node-${3%%,*}"\necho node-last\n')
    setting.environment |= {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "7,8,9",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_SUBMIT_DIR": str(setting.repo),
    }
    shutil.copytree(setting.repo / "scripts", setting.repo / "spool")

    def slurm(*args: str, **environment: str):
        return setting.run("spool/multinode_trainer.slurm", *args, cwd=setting.bin, **environment)

    return slurm


def test_a_slurm_job_starts_the_trainer_on_every_machine(setting, slurm):
    result = slurm("train_configs/qwen3_debug.toml", "--training.steps", "7", SLURM_RESTART_COUNT="2")
    assert result.returncode == 0, result.stderr
    (run,) = setting.calls("run")
    assert "-m zephon_patches.launch --nnodes 3 --nproc_per_node 4 --max_restarts 0 " in run
    assert "--rdzv_id 1234567-2 --rdzv_backend c10d --rdzv_endpoint node-7:24567 " in run
    assert "-m torchtitan.train --job.config_file train_configs/qwen3_debug.toml --training.steps 7 |" in run
    assert f"| in {setting.repo} |" in run and f"PYTHONPATH={setting.repo}" in run


def test_a_slurm_job_trains_the_8b_config_by_default(setting, slurm):
    assert slurm().returncode == 0
    assert "--job.config_file train_configs/llama3_8b.toml |" in setting.calls("run")[0]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "start it with sbatch"),
        ({"SLURM_SUBMIT_DIR": "/usr"}, "/usr is not the repository"),
    ],
)
def test_a_slurm_job_that_cannot_start_says_why(setting, slurm, environment, message):
    result = slurm(**environment)
    assert result.returncode == 1 and message in result.stderr
    assert "no config nope.toml" in slurm("nope.toml").stderr
    assert setting.calls("run") == []


# elastic_demo.sh


def test_the_demo_trains_2_then_3_then_1_ranks_in_one_folder(setting):
    setting.has("torchtitan-zephon", "matplotlib")
    result = setting.run("scripts/elastic_demo.sh", "--training.local_batch_size", "3")
    assert result.returncode == 0, result.stderr
    *calls, comparison = setting.calls()
    starts = [call for call in calls if "zephon_patches.launch" in call]
    out = setting.repo / "outputs" / "elastic_demo"
    expected = [(2, "uninterrupted", 12), (2, "elastic", 4), (3, "elastic", 8), (1, "elastic", 12)]
    for start, (ranks, name, steps) in zip(starts, expected, strict=True):
        assert f"--nproc_per_node {ranks} " in start
        assert "--training.local_batch_size 3 " in start
        assert f"--job.dump_folder {out}/{name} --training.steps {steps} " in start
    assert comparison.startswith(
        f"script {setting.repo}/scripts/elastic_demo.py {out}/uninterrupted/record {out}/elastic"
    )


@pytest.mark.parametrize(("gpus", "on_cpu"), [(1, True), (2, True), (3, False), (8, False)])
def test_the_demo_uses_gpus_where_there_are_three(setting, gpus, on_cpu):
    setting.has("torchtitan-zephon", "matplotlib")
    setting.stub("nvidia-smi", f'#!/bin/bash\nfor i in $(seq {gpus}); do echo "GPU $i: X (UUID: GPU-$i)"; done\n')
    del setting.environment["CUDA_VISIBLE_DEVICES"]
    result = setting.run("scripts/elastic_demo.sh")
    assert ("training on the CPU" in result.stderr) == on_cpu
    # CPU processes share the cores; those with a GPU keep their threads.
    assert all(("OMP= " not in call) == on_cpu for call in setting.calls("run"))


def test_a_demo_run_that_fails_fails_the_demo_and_shows_its_log(setting):
    setting.has("torchtitan-zephon", "matplotlib")
    result = setting.run("scripts/elastic_demo.sh", STUB_FAILS="zephon_patches.launch")
    assert result.returncode == 1
    assert "uninterrupted.log" in result.stderr


# elastic_nodes.sh


def test_elastic_nodes_gets_demo_data_and_the_arguments(setting):
    setting.has("torchtitan-zephon")
    result = setting.run("scripts/elastic_nodes.sh", "--out", "a b")
    assert result.returncode == 0, result.stderr
    assert setting.calls() == [
        f"script {setting.repo}/scripts/make_demo_data.py",
        f"script {setting.repo}/scripts/elastic_nodes.py --out a b",
    ]


# upstream_tests.sh, which needs the real Python: it imports the overlay


def checkout(folder: Path, version: str = "0.2.2") -> Path:
    """A folder that looks like a checkout of TorchTitan, with one test of the overlay and one that fails."""
    for name, text in {
        "pyproject.toml": '[project]\nname = "torchtitan"\n',
        "assets/version.txt": f"{version}\n",
        "torchtitan/__init__.py": "raise ImportError('the tested code is not the checkout')\n",
        "tests/__init__.py": "",
        "tests/unit_tests/__init__.py": "",
        "tests/unit_tests/helper.py": "NAME = 'zephon'\n",
        "tests/unit_tests/test_job_config.py": (
            "from tests.unit_tests.helper import NAME\n"
            "from torchtitan.config import JobConfig\n"
            "def test_overlay():\n"
            "    assert JobConfig().data.loading_strategy != NAME\n"
            "    assert open('assets/version.txt').read()\n"
        ),
        "tests/unit_tests/test_checkpoint.py": "def test_fails():\n    assert False\n",
        "tests/unit_tests/test_other.py": "raise ImportError('not asked for')\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def upstream_tests(*args: str | Path):
    return subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "upstream_tests.sh"), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_upstreams_tests_run_on_top_of_the_overlay(tmp_path):
    folder = checkout(tmp_path / "a checkout")
    passed = upstream_tests(folder, "-k", "overlay")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "1 passed" in passed.stdout
    assert "left out: tests/unit_tests/test_tokenizer.py" in passed.stderr
    failed = upstream_tests(folder)
    assert failed.returncode == 1 and "1 failed, 1 passed" in failed.stdout


def test_a_folder_that_is_no_checkout_of_the_tag_is_refused(tmp_path):
    assert "usage: scripts/upstream_tests.sh CHECKOUT" in upstream_tests().stderr
    assert "usage:" in upstream_tests("--help").stdout
    folders = {
        "there is no folder": tmp_path / "none",
        "no checkout of TorchTitan": tmp_path,
        "is TorchTitan 0.3.0, and this fork stands on v0.2.2": checkout(tmp_path / "newer", "0.3.0"),
        "has no tests/unit_tests": checkout(tmp_path / "package"),
    }
    shutil.rmtree(folders["has no tests/unit_tests"] / "tests")
    for message, folder in folders.items():
        result = upstream_tests(folder)
        assert result.returncode == 2 and message in result.stderr


# make_demo_data.py


@pytest.fixture
def library(tmp_path):
    """A small standard library."""
    library = tmp_path / "lib"
    for name, text in {
        "b.py": "print('b')\n",
        "a.py": "# ä\u2028\r\nx = '\\x00'\n",
        "pkg/c.py": "def c():\n    return 1\n" * 50,
        "test/test_a.py": "not taken",
        "site-packages/other.py": "not taken",
        "notes.txt": "not taken",
    }.items():
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(text.encode())
    (library / "latin.py").write_bytes(b"# caf\xe9\n")
    return library


def documents(folder: Path) -> list[dict]:
    files = sorted((folder / "corpus").iterdir())
    return [json.loads(line) for file in files for line in file.read_bytes().decode().split("\n") if line]


def files_under(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_demo_corpus_is_the_library_in_a_fixed_order(tmp_path, library, capsys):
    folder = tmp_path / "demo"
    assert make_demo_data.make_demo_data(folder, library=library)
    assert [document["path"] for document in documents(folder)] == ["a.py", "b.py", "pkg/c.py"]
    for document in documents(folder):
        assert document["text"].encode() == (library / document["path"]).read_bytes()
    assert "3 documents (1 skipped: not UTF-8)" in capsys.readouterr().out


def test_the_demo_data_are_the_same_every_time(tmp_path, library):
    for name in ("one", "two"):
        make_demo_data.make_demo_data(tmp_path / name, library=library)
    assert files_under(tmp_path / "one") == files_under(tmp_path / "two")


def test_the_demo_tokenizer_fits_the_debug_model_and_torchtitan(tmp_path, library):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    folder = tmp_path / "demo"
    make_demo_data.make_demo_data(folder, library=library)
    tokenizer = HuggingFaceTokenizer(str(folder / "tokenizer"))
    assert tokenizer.get_vocab_size() <= 2048
    assert {tokenizer.bos_id, tokenizer.eos_id} == {0, 1}
    text = "def c(): ä €\n\t🙂"
    ids = tokenizer.encode(text, add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert tokenizer.decode(ids[1:-1]) == text, "every byte has an entry"


def test_complete_demo_data_are_left_alone(tmp_path, library, capsys):
    folder = tmp_path / "demo"
    make_demo_data.make_demo_data(folder, library=library)
    before = files_under(folder)
    (library / "new.py").write_text("new")
    capsys.readouterr()
    assert not make_demo_data.make_demo_data(folder, library=library)
    assert capsys.readouterr().out == ""
    assert files_under(folder) == before
    assert make_demo_data.make_demo_data(folder, force=True, library=library)
    assert files_under(folder) != before


def test_an_interrupted_run_leaves_nothing_that_looks_finished(tmp_path, library, monkeypatch):
    folder = tmp_path / "demo"

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_demo_data, "write_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_demo_data.make_demo_data(folder, library=library)
    assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["lib"]


def test_something_else_in_its_place_is_not_overwritten(tmp_path, library):
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years of work")
    with pytest.raises(FileExistsError, match="not complete demo data"):
        make_demo_data.make_demo_data(folder, library=library)
    assert (folder / "thesis.txt").exists()


def test_a_library_without_sources_is_an_error(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no Python sources"):
        make_demo_data.make_demo_data(tmp_path / "demo", library=tmp_path / "empty")
    assert not (tmp_path / "demo").exists()


def test_the_real_library_has_more_than_a_handful_of_sources():
    import sysconfig

    names = [path.name for path in make_demo_data.sources(Path(sysconfig.get_path("stdlib")))]
    assert len(names) > 100 and "ast.py" in names


# The debug config


def test_the_debug_config_says_what_the_issue_asks(monkeypatch):
    from torchtitan.config import ConfigManager

    monkeypatch.chdir(REPOSITORY)
    config = ConfigManager().parse_args(["--job.config_file", "train_configs/llama3_debug.toml"])
    assert config.data.loading_strategy == "zephon"
    assert [source.path for source in config.data.sources] == ["./demo_data/corpus/*.jsonl"]
    assert config.training.steps == 20
    assert (config.training.global_batch_size, config.training.local_batch_size) == (12, 2)
    assert config.training.mixed_precision_param == "float32"
    assert config.debug.seed is not None and config.lr_scheduler.total_steps is not None
    assert config.checkpoint.enable and config.checkpoint.interval == 10
    assert config.checkpoint.last_save_model_only is False
    assert config.compile.enable is False


def test_each_setting_of_the_debug_config_has_a_comment():
    text = (REPOSITORY / "train_configs" / "llama3_debug.toml").read_text()
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            assert "  # " in line, line
