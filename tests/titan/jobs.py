"""A trainer that trains nothing: TorchTitan's settings, loaders and checkpoint manager, with a model of six numbers.

What it does around a step, and in which order, is what TorchTitan's trainer does; where that is short, it is
TorchTitan's own function.
"""

import copy
import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tests.corpora import Corpus
from tests.reference import Sample
from tests.resume import rows_of, without_padding
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import build_text_dataloader
from torchtitan.train import Trainer
from zephon_patches import SourceConfig

BATCH, SEQ_LEN = 12, 8


def job(corpus: Corpus, folder: Path | None = None, **settings: Any) -> JobConfig:
    """Settings of a run over a corpus; ``data__seed=1`` sets ``data.seed``.

    Args:
        folder: Where its checkpoints are; without it nothing is saved.
    """
    config = JobConfig()
    config.data.loading_strategy = "zephon"
    config.data.sources = [SourceConfig("web", str(corpus.texts))]
    config.data.cache_dir = str(corpus.folder / "cache")
    config.model.hf_assets_path = str(corpus.tokenizer)
    config.training.local_batch_size = 2
    config.training.global_batch_size = BATCH
    config.training.seq_len = SEQ_LEN
    config.training.steps = 1000
    if folder is not None:
        config.job.dump_folder = str(folder)
        config.checkpoint.enable = True
        config.checkpoint.interval = 1
        config.checkpoint.keep_latest_k = 0
    return changed(config, **settings)


def changed(config: JobConfig, **settings: Any) -> JobConfig:
    """A copy with other settings."""
    config = copy.deepcopy(config)
    for name, value in settings.items():
        table, key = name.split("__")
        assert hasattr(getattr(config, table), key), name
        setattr(getattr(config, table), key, value)
    return config


class Metrics:
    """Keeps what the trainer gives to its log."""

    def __init__(self) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []
        self.logged: list[dict[str, Any]] = []
        self.validation_losses: list[float] = []

    def log(
        self, step: int, loss: float, max_loss: float, norm: float, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        self.logged.append({"step": step, **(extra_metrics or {})})

    def log_validation(self, loss: float, step: int) -> None:
        self.validation_losses.append(loss)


class FakeTrainer:
    """One rank of a run.

    Args:
        config: It is copied, as each process reads its own.
        dp_rank, dp_size: Place in the batch mesh.
        dataloader: In place of the one that the settings ask for.
        model: In place of a fresh one.
        sd_adapter: Reads weights in Hugging Face's format.
    """

    alive: ClassVar[weakref.WeakSet["FakeTrainer"]] = weakref.WeakSet()

    state_dict = Trainer.state_dict
    load_state_dict = Trainer.load_state_dict
    batch_generator = Trainer.batch_generator

    def __init__(
        self,
        config: JobConfig,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        dataloader: Any = None,
        model: nn.Module | None = None,
        sd_adapter: Any = None,
    ) -> None:
        self.job_config = config = copy.deepcopy(config)
        # One rank writes for all of them; DCP does not know of the others here.
        config.checkpoint.load_only |= dp_rank > 0
        self.dataloader = dataloader
        if dataloader is None:
            self.dataloader = build_text_dataloader(dp_size, dp_rank, None, config)
        self.metrics_processor = Metrics()
        self.model = model or nn.Linear(2, 2)
        optimizers = OptimizersContainer([self.model], torch.optim.SGD, {"lr": 0.1})
        self.step = 0
        self.ntokens_seen = 0
        self.checkpointer = CheckpointManager(
            dataloader=self.dataloader,
            model_parts=[self.model],
            optimizers=optimizers,
            lr_schedulers=build_lr_schedulers(optimizers, config.lr_scheduler, config.training.steps),
            states={"train_state": self},
            checkpoint_config=config.checkpoint,
            sd_adapter=sd_adapter,
            base_folder=config.job.dump_folder,
        )
        rows = config.training.local_batch_size * dp_size
        self.gradient_accumulation_steps = config.training.global_batch_size // rows
        self.batches: Any = None
        self.alive.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Ends all workers. Left to the garbage collector, which takes apart whole circles, each waits for 5 s."""
        for trainer in list(cls.alive):
            trainer.batches = None
            trainer.checkpointer.close()

    def load(self) -> "FakeTrainer":
        self.checkpointer.load(self.job_config.checkpoint.load_step)
        return self

    def train_step(self) -> list[Sample]:
        """One step: its rows without padding."""
        if self.batches is None:
            self.batches = self.batch_generator(self.dataloader)
        self.step += 1
        rows = [row for _ in range(self.gradient_accumulation_steps) for row in rows_of(next(self.batches))]
        self.metrics_processor.log(self.step, 1.0, 1.0, 1.0, extra_metrics={"n_tokens_seen": self.ntokens_seen})
        self.checkpointer.save(self.step, last_step=self.step == self.job_config.training.steps)
        return without_padding(rows)

    def train(self, steps: int) -> list[Sample]:
        return [row for _ in range(steps) for row in self.train_step()]
