"""The time from a cold start of a training run to the end of its first step, against TorchTitan's own loader.

    PYTHONPATH=. python benchmarks/real_text.py --folder /tmp/real_text
    PYTHONPATH=. python benchmarks/first_step.py --folder /tmp/real_text

Cold: no token store, and no cache of `datasets`. Alternates between `run_train.sh` with both values of
`data.loading_strategy` (llama3's debug model, one process, all text, a tokenizer of 2,048 entries), then starts again
with what the first start left. "stock" reads all text into a cache of its own, and tokenizes while it trains;
"zephon" tokenizes all of it first. Prints each pair and the medians.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

CONFIG = """
[job]
dump_folder = "{work}/run"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/bpe2k"
[data]
loading_strategy = "{strategy}"
cache_dir = "{work}/cache"
[[data.sources]]
name = "text"
path = "{folder}/jsonl"
[training]
local_batch_size = 1
seq_len = 512
steps = 1
dataset = "c4_test"
dataset_path = "{folder}/jsonl"
mixed_precision_param = "float32"
[metrics]
log_freq = 1
[activation_checkpoint]
mode = "none"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what real_text.py wrote")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {"cold": [], "again": []}
    for number in range(1, args.rounds + 1):
        seconds = {}
        for strategy in ("stock", "zephon"):
            work = Path(tempfile.mkdtemp(dir=args.folder))
            try:
                for start in ("cold", "again"):
                    seconds[strategy, start] = first_step(work, args.folder.resolve(), strategy)
            finally:
                shutil.rmtree(work)
        for start, values in ratios.items():
            stock, zephon = seconds["stock", start], seconds["zephon", start]
            values.append(zephon / stock)
            print(
                f"round {number}, {start:5}: stock {stock:6.1f} s, zephon {zephon:6.1f} s, ratio {values[-1]:.2f}",
                flush=True,
            )
    for start, values in ratios.items():
        print(f"median, {start}: {statistics.median(values):.2f} of stock's time")


def first_step(work: Path, folder: Path, strategy: str) -> float:
    """Seconds from the start of a run to the line of its first step."""
    config = work / "config.toml"
    config.write_text(CONFIG.format(work=work, folder=folder, strategy=strategy))
    environment = os.environ | {"NGPU": "1", "CONFIG_FILE": str(config), "HF_HOME": str(work / "hf")}
    environment |= {"HF_DATASETS_OFFLINE": "1"}
    started = time.perf_counter()
    seen = []
    with subprocess.Popen(
        ["./run_train.sh"], cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        seconds = None
        for line in process.stdout:
            seen.append(line)
            if seconds is None and "step:" in line and "loss:" in line:
                seconds = time.perf_counter() - started
    if seconds is None or process.returncode:
        raise SystemExit("".join(seen[-40:]) + f"the {strategy} run failed")
    return seconds


if __name__ == "__main__":
    main()
