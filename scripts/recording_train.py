"""TorchTitan's trainer, noting what each step trained on: TRAIN_FILE=scripts.recording_train ./run_train.sh

Each rank appends a line of JSON for each step to ``$RECORD_FOLDER/rank-<rank>.jsonl``:

    {"step": 5, "ranks": 3, "dp_rank": 0, "first": 48, "end": 60, "rows": ["b4e1...", ...], "loss": 6.52}

``rows`` has a digest of the inputs and labels of each row of this rank, in order and without padding rows, taken from
the tensors that the trainer gets; ``first`` and ``end`` are the loader's cursor before and after the step.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchtitan.train


class RecordingTrainer(torchtitan.train.Trainer):
    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        folder = Path(os.environ["RECORD_FOLDER"])
        folder.mkdir(parents=True, exist_ok=True)
        self.record_file = folder / f"rank-{os.environ['RANK']}.jsonl"
        self.losses: list[float] = []
        log = self.metrics_processor.log

        def log_and_keep(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            self.losses.append(loss)
            log(step, loss, *args, **kwargs)

        self.metrics_processor.log = log_and_keep

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        rows: list[str] = []
        first = self.dataloader.cursor
        super().train_step(noted(data_iterator, rows))
        line = {
            "step": self.step,
            "ranks": int(os.environ["WORLD_SIZE"]),
            "dp_rank": self.dataloader.topology.dp_rank,
            "first": first,
            "end": self.dataloader.cursor,
            "rows": rows,
            "loss": self.losses.pop() if self.losses else None,
        }
        with self.record_file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def noted(data_iterator: Iterator[Any], rows: list[str]) -> Iterator[Any]:
    """The same items; digests of their rows are appended to ``rows``."""
    for inputs, labels in data_iterator:
        for row, row_labels in zip(inputs["input"], labels, strict=True):
            if (row_labels != -100).any():
                content = row.numpy().tobytes() + row_labels.numpy().tobytes()
                rows.append(hashlib.blake2b(content, digest_size=8).hexdigest())
        yield inputs, labels


if __name__ == "__main__":
    torchtitan.train.main(RecordingTrainer)
