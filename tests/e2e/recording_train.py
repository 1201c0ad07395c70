"""TorchTitan's trainer, writing down what it trains on; started by the tests as TRAIN_FILE.

Each rank appends to ``$RECORD_FOLDER/rank-<r>.jsonl`` a line for each step: its rank in the batch mesh, its rows
that are not padding as [inputs, labels], the cursor after the step and, where the rank logs it, the loss. With
``$PLANT_SWAP`` = "a,b" the samples numbered a and b change places: a fault that the tests must notice.
"""

import json
import os
from pathlib import Path

import torchtitan.train
from torchtitan.components.metrics import MetricsProcessor
from zephon_patches.order.global_order import GlobalOrder


class RecordingTrainer(torchtitan.train.Trainer):
    def train_step(self, data_iterator):
        rows: list = []
        losses: list = []
        self.metrics_processor.log = lambda step, loss, *rest, **named: (
            losses.append(loss),
            MetricsProcessor.log(self.metrics_processor, step, loss, *rest, **named),
        )
        super().train_step(record(data_iterator, rows))
        line = {
            "step": self.step,
            "dp_rank": self.dataloader.topology.dp_rank,
            "rows": rows,
            "cursor": self.dataloader.cursor,
            "loss": losses[0] if losses else None,
        }
        with open(Path(os.environ["RECORD_FOLDER"]) / f"rank-{os.environ['RANK']}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


def record(data_iterator, rows):
    for inputs, labels in data_iterator:
        for row, label in zip(inputs["input"].tolist(), labels.tolist(), strict=True):
            if any(value != -100 for value in label):
                rows.append([row, label])
        yield inputs, labels


def plant_swap(a: int, b: int) -> None:
    locate = GlobalOrder.locate

    def swapped(self, numbers):
        numbers = numbers.copy()
        is_a, is_b = numbers == a, numbers == b
        numbers[is_a], numbers[is_b] = b, a
        return locate(self, numbers)

    GlobalOrder.locate = swapped


if __name__ == "__main__":
    if "PLANT_SWAP" in os.environ:
        plant_swap(*map(int, os.environ["PLANT_SWAP"].split(",")))
    torchtitan.train.main(RecordingTrainer)
