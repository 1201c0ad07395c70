"""Fine-tuning as users run it: the loss counts what the assistant says, and nothing else.

What the user says is noise, and what the assistant says is always the same. So a loss that counts the assistant's
tokens alone falls to nothing in a few steps, and one that counts any of the noise cannot.
"""

import json
import os
import random
import re
import subprocess
from pathlib import Path

from tests.prepare.test_chat import write_tokenizer

REPO = Path(__file__).parents[2]

CONFIG = """
[job]
dump_folder = "{folder}/out"
[data]
loading_strategy = "zephon"
cache_dir = "{folder}/cache"
packing = "best_fit"
positions = true
[[data.sources]]
name = "chat"
path = "{folder}/texts"
chat_field = "messages"
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "{folder}/tokenizer"
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[training]
local_batch_size = 2
global_batch_size = 4
seq_len = 128
steps = 6
mixed_precision_param = "float32"
[metrics]
log_freq = 1
[debug]
seed = 1
[activation_checkpoint]
mode = "none"
"""


def test_noise_of_the_user_is_not_in_the_loss(tmp_path):
    write_tokenizer(tmp_path / "tokenizer")
    numbers = random.Random(0)
    noise = ["".join(chr(numbers.randrange(33, 127)) for _ in range(40)) for _ in range(400)]
    answer = {"role": "assistant", "content": "yes you and no kind"}
    lines = [json.dumps({"messages": [{"role": "user", "content": text}, answer]}) + "\n" for text in noise]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_text("".join(lines))
    (tmp_path / "config.toml").write_text(CONFIG.format(folder=tmp_path))
    ended = subprocess.run(
        ["./run_train.sh"],
        cwd=REPO,
        env={**os.environ, "NGPU": "1", "CONFIG_FILE": str(tmp_path / "config.toml")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([\d.]+)", plain)]
    assert len(losses) == 6
    assert losses[0] > 5
    assert max(losses[-2:]) < 0.1
