"""DDS in a Trainer of Lightning 2, as a callback.

training_step        its losses, one per example, become dds.loss()
on_train_batch_end   dds.step(), if the optimizer's turn has come
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.utils.data import RandomSampler

from ..errors import GradsieveError, check
from ..record import StepRecord
from ..reweight import DDS


class DDSCallback(pl.Callback):
    """Weighs the examples of every training batch by a scorer that learns from a dev set.

    ::

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.cross_entropy(self(x), y, reduction="none")        # one loss per example

        trainer = Trainer(callbacks=[DDSCallback(dev_loader)])

    ``training_step`` returns its losses, (B,), or a dict with them as ``"loss"``. It runs again for dev gradient and
    rewards; what it logs there is not heard. Accumulation, clipping, mixed precision, DDP and checkpoints are
    Lightning's. Logged as training goes on: ``dds_loss`` (weighted), ``dds_dev_loss``, ``dds_effective_sample_size``.

    Args:
        dev_loader: any re-iterable of batches, as in `DDS`. Under DDP a DataLoader is shared out among the processes as
            Lightning does it with the training loader; of anything else give each process its part.
        scorer: as in `DDS`.
        options: further arguments of `DDS`, by name.

    `dds` is the `DDS` of the training that runs or ran last, `record` its last record.
    """

    def __init__(
        self, dev_loader: Iterable[Any], scorer: nn.Module | None = None, options: Mapping[str, Any] | None = None
    ):
        self.dev_loader, self.scorer, self.options = dev_loader, scorer, dict(options or {})
        self.dds: DDS | None = None
        self.record: StepRecord | None = None
        self._saved: dict[str, Any] | None = None
        self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check(
            pl_module.automatic_optimization and len(trainer.optimizers) == 1,
            "DDSCallback works with automatic optimization and one optimizer. With manual optimization call dds.loss() "
            "and dds.step() yourself.",
        )
        check(
            isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy),
            f"DDSCallback works on one device or with DDP, not with {type(trainer.strategy).__name__}.",
        )
        scorer = None if self.scorer is None else self.scorer.to(pl_module.device)
        lesson = _Lesson(pl_module)
        model = trainer.strategy.model or pl_module
        self.dds = DDS(model, scorer, lesson.losses, trainer.optimizers[0], self._own_part(trainer), **self.options)
        if self._saved is not None:
            self.dds.load_state_dict(self._saved)
            self._saved = None
        self._steps = trainer.global_step
        pl_module.training_step = lesson.replaced(self.dds, trainer)  # type: ignore[method-assign]

    def _own_part(self, trainer: pl.Trainer) -> Any:
        """Of the dev loader, by the sampler that Lightning gives the training loader under DDP."""
        shuffled = isinstance(getattr(self.dev_loader, "sampler", None), RandomSampler)
        return trainer._data_connector._prepare_dataloader(self.dev_loader, shuffled, RunningStage.TRAINING)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.dds is None or trainer.global_step == self._steps:  # accumulating
            return
        self._steps = trainer.global_step
        loss, record = self.dds.weighted_loss, self.dds.step()
        pl_module.log("dds_loss", loss, prog_bar=True)
        if record is not None and record.dev_loss is not None:
            self.record = record
            pl_module.log("dds_dev_loss", record.dev_loss)
            pl_module.log("dds_effective_sample_size", record.effective_sample_size)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.__dict__.pop("training_step", None)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        pl_module.__dict__.pop("training_step", None)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.dds is None else self.dds.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict or None


class _Lesson:
    """The user's ``training_step``, as a loss_fn."""

    def __init__(self, module: pl.LightningModule):
        self.module = module
        self.step = module.training_step
        self.rest: tuple[Any, ...] = ()  # what comes after the batch
        self.output: Any = None
        self.heard = False

    def replaced(self, dds: DDS, trainer: pl.Trainer) -> Any:
        """What Lightning is to call instead."""

        @functools.wraps(self.step)
        def training_step(batch: Any, *rest: Any) -> Any:
            self.rest, self.heard = rest, True
            loss = dds.loss(batch) * trainer.accumulate_grad_batches  # by which Lightning divides; weights sum to 1
            return {**self.output, "loss": loss} if isinstance(self.output, Mapping) else loss

        return training_step

    def losses(self, _: nn.Module, batch: Any) -> Tensor:
        """DDS's `loss_fn`. Lightning has gone through DistributedDataParallel already when it calls the step."""
        heard, self.heard = self.heard, False  # the training forward comes first
        with nullcontext() if heard else _unheard(self.module):
            output = self.step(batch, *self.rest)
        if heard:
            self.output = output
        losses = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise GradsieveError(
                f"training_step must return one loss per example, shape (B,), but returned {found}. "
                "Ask the loss for reduction='none' and average over everything but the batch."
            )
        return losses


@contextmanager
def _unheard(module: pl.LightningModule) -> Iterator[None]:
    """Inside, the module logs nothing."""
    silent = {name: lambda *_, **__: None for name in ("log", "log_dict")}
    module.__dict__.update(silent)
    try:
        yield
    finally:
        for name in silent:
            del module.__dict__[name]
