"""DDS in the Trainer of Hugging Face Transformers 5: other arguments, the same training loop.

training_step   dds.loss() of each micro-batch instead of the model's own mean
on_optimizer_step, right after every optimizer.step()   dds.step()
"""

import inspect
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import Trainer, TrainerCallback

from ..errors import GradsieveError, check
from ..record import StepRecord
from ..reweight import DDS
from .per_example import NOT_KNOWN, example_losses


class DDSTrainer(Trainer):
    """Transformers' Trainer, with every example weighed by a scorer that learns from a dev set.

    ::

        trainer = DDSTrainer(model, args, train_dataset=train, eval_dataset=eval, dds_dev_dataset=dev)
        trainer.train()

    Everything else is the Trainer's: accumulation, clipping, bf16, evaluation, callbacks, torchrun. A checkpoint holds
    scorer and DDS too, and ``resume_from_checkpoint`` goes on from there. ``dds_dev_loss`` and
    ``dds_effective_sample_size`` stand in the log beside the loss, which is the weighted one.

    An example's loss is the mean over its labels that count (not padding, not -100), label smoothing included.

    Args:
        scorer: as in `DDS`; it is called with the collated batch, a dict. What it reads there beyond what the model
            takes it must declare, ``columns = ("source",)``, or the Trainer drops it (``remove_unused_columns``).
        dds_dev_dataset: examples that look like what the model will meet, in the form of the training set.
        dds_dev_batch_size: how many of them each process takes for a dev gradient; by default as for training.
        dds_options: further arguments of `DDS`, by name.
        compute_loss_func: as the Trainer's, but it must return one loss per example, shape (B,).

    The rest is handed to the Trainer. `dds` is the `DDS` of the training that runs or ran last.
    """

    dds: DDS | None = None
    record: StepRecord | None = None
    """The last one."""

    def __init__(
        self,
        *args: Any,
        scorer: nn.Module | None = None,
        dds_dev_dataset: Dataset[Any] | None = None,
        dds_dev_batch_size: int | None = None,
        dds_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.scorer, self.dds_options = scorer, {"seed": self.args.seed, **(dds_options or {})}
        unknown = set(self.dds_options) - set(inspect.signature(DDS).parameters)
        check(not unknown, f"dds_options names {sorted(unknown)}, which DDS does not have.")
        check(
            not self.is_deepspeed_enabled and not self.is_fsdp_enabled and self.args.n_gpu <= 1,
            "DDSTrainer works in one process for each device (torchrun), not with DeepSpeed, Trainer's fsdp or "
            "nn.DataParallel. For FSDP2 use DDS in a loop of your own.",
        )
        self.columns = tuple(getattr(scorer, "columns", ()))
        for name, dataset in (("train_dataset", self.train_dataset), ("dds_dev_dataset", dds_dev_dataset)):
            absent = set(self.columns) - (_columns(dataset) or set(self.columns))
            check(not absent, f"the scorer reads {sorted(absent)}, which {name} does not have.")
        self.dev_loader = self._dev_loader(dds_dev_dataset, dds_dev_batch_size or self.args.train_batch_size)
        self._checkpoint: str | None = None
        self.add_callback(_Moments(self))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        if return_outputs or self.dds is None or not torch.is_grad_enabled():  # evaluation
            return super().compute_loss(model, self._for_model(inputs), return_outputs, num_items_in_batch)
        with self.accelerator.autocast(), _missing_columns(inputs):
            return self.dds.loss(dict(inputs))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        assert self.dds is not None
        self.current_gradient_accumulation_steps = 1  # weights sum to 1 over all micro-batches: nothing to divide by
        before = self.dds.weighted_loss
        super().training_step(model, inputs, *args, **kwargs)
        return self.dds.weighted_loss - before

    def example_losses(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """DDS's `loss_fn`: one loss per example of a collated batch, (B,)."""
        check("labels" in batch, f"the batch has no labels, only {sorted(batch)}: DDS needs them for its losses.")
        labels = batch["labels"]
        outputs = model(**{name: value for name, value in self._for_model(batch).items() if name != "labels"})
        if self.compute_loss_func is not None:
            return _checked(self.compute_loss_func(outputs, labels, num_items_in_batch=None), labels)
        own = self.accelerator.unwrap_model(model)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if logits is None:
            raise GradsieveError(f"{type(own).__name__} returns no logits. {NOT_KNOWN.format('it')}")
        return example_losses(own, logits, labels, self.args.label_smoothing_factor)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, self._for_model(inputs), *args, **kwargs)

    def compute_loss_context_manager(self) -> Any:
        """Autocast stands outside of the model, where DDS sees it, not inside, where accelerate puts it."""
        return self.accelerator.autocast()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self.dds is not None and self.record is not None:
            assert self.record.dev_loss is not None
            logs["dds_dev_loss"] = float(self.record.dev_loss)
            logs["dds_effective_sample_size"] = float(self.record.effective_sample_size)
            logs["dds_skipped"] = self.dds.skipped
        super().log(logs, *args, **kwargs)

    def begin(self) -> None:
        """Model and optimizer are prepared now: DDS is made, or goes on from the checkpoint."""
        own = self.accelerator.unwrap_model(self.model_wrapped)
        if "_original_forward" in own.__dict__:
            own.forward = own.__dict__.pop("_original_forward")
        scorer = None if self.scorer is None else self.scorer.to(self.args.device)
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        self.record = None
        self.dds = DDS(self.model_wrapped, scorer, self.example_losses, optimizer, self.dev_loader, **self.dds_options)
        if self._checkpoint is not None:
            self.dds.load_state_dict(torch.load(self._saved(self._checkpoint), map_location="cpu"))
            self._checkpoint = None

    def _dev_loader(self, dataset: Dataset[Any] | None, size: int) -> DataLoader[Any]:
        """The part of the dev set that this process sees, collated as training batches are."""
        if dataset is None:
            raise GradsieveError("DDSTrainer needs dds_dev_dataset: examples that look like what the model will meet.")
        if not isinstance(dataset, Sized):
            raise GradsieveError("dds_dev_dataset must have a length; it cannot be a stream.")
        processes = self.args.world_size
        check(
            len(dataset) >= size * processes,
            f"dds_dev_dataset has {len(dataset)} examples, fewer than a dev batch of {size} in each of {processes} "
            "process(es). Give more of them, or a smaller dds_dev_batch_size.",
        )
        part = Subset(dataset, range(self.args.process_index, len(dataset) - len(dataset) % processes, processes))
        collate = self._get_collator_with_removed_columns(self.data_collator, description="dds dev")
        return DataLoader(part, size, shuffle=True, drop_last=True, collate_fn=lambda examples: dict(collate(examples)))

    def _for_model(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Without the columns that only the scorer reads."""
        taken = inspect.signature(self.accelerator.unwrap_model(self.model).forward).parameters
        return {name: value for name, value in batch.items() if name in taken or name not in self.columns}

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        names: Any = self._signature_columns
        self._signature_columns = names + [name for name in self.columns if name not in names]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.dds is not None
        Path(output_dir).mkdir(parents=True, exist_ok=True)  # the first process may not have come to it yet
        torch.save(self.dds.state_dict(), _file(output_dir, self.args.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self._checkpoint = checkpoint

    def _saved(self, checkpoint: str) -> Path:
        """The file of this process, or the first one's where fewer processes have written the checkpoint."""
        own, first = _file(checkpoint, self.args.process_index), _file(checkpoint, 0)
        check(
            first.exists(), f"{checkpoint} holds no {first.name}: DDSTrainer did not write it, or save_only_model did."
        )
        return own if own.exists() else first


class _Moments(TrainerCallback):
    """The two moments of the Trainer's loop at which DDS has something to do."""

    def __init__(self, trainer: DDSTrainer):
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.begin()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        assert self.trainer.dds is not None
        self.trainer.record = self.trainer.dds.step() or self.trainer.record


def _file(checkpoint: str, process: int) -> Path:
    return Path(checkpoint) / f"dds_{process}.pt"


def _columns(dataset: Any) -> set[str] | None:
    """The names that its examples have; None if that cannot be told without drawing from a stream."""
    if hasattr(dataset, "column_names"):
        return set(dataset.column_names)
    first = dataset[0] if hasattr(dataset, "__getitem__") and len(dataset) else None
    return set(first) if isinstance(first, Mapping) else None


def _checked(losses: Any, labels: Tensor) -> Tensor:
    found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    check(
        found == (len(labels),),
        f"compute_loss_func must return one loss per example, shape ({len(labels)},), but returned {found}. "
        "Ask the loss for reduction='none' and average over everything but the batch.",
    )
    return losses


@contextmanager
def _missing_columns(batch: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        name = error.args[0]
        if not isinstance(name, str) or name in batch:
            raise
        raise GradsieveError(
            f"the scorer looks for {name!r} in a batch that has {sorted(batch)}. The Trainer drops what the model does "
            f"not read (remove_unused_columns); let the scorer declare columns = ({name!r},) to keep it."
        ) from error
