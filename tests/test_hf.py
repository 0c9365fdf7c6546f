"""DDSTrainer: the Trainer of Transformers with DDS inside does what a loop of one's own does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import two_processes
from torch import Tensor, nn

from gradsieve import DDS, GradsieveError, SignalScorer

transformers = pytest.importorskip("transformers", reason="needs gradsieve[hf]")
pytest.importorskip("accelerate", reason="needs gradsieve[hf]")

from torch.utils.data import DataLoader  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from gradsieve.integrations.hf import DDSTrainer  # noqa: E402
from gradsieve.integrations.per_example import (  # noqa: E402
    causal_lm_losses,
    classification_losses,
    example_losses,
    multi_label_losses,
    regression_losses,
    token_losses,
)

WORDS, LENGTH = 20, 6
Example = dict[str, Any]


def sentences(count: int, seed: int, *, causal: bool = False) -> list[Example]:
    """Random words, the last of them padding; classes, or the words themselves as labels."""
    chance = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        ids = torch.randint(1, WORDS, (LENGTH,), generator=chance)
        mask = torch.arange(LENGTH) < 3 + number % 4
        labels: Any = torch.where(mask, ids, -100) if causal else int(torch.randint(3, (), generator=chance))
        found.append({"input_ids": ids * mask, "attention_mask": mask.long(), "labels": labels})
    return found


def bert(dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(3)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=3,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )


def gpt(dropout: float = 0.0) -> PreTrainedModel:
    torch.manual_seed(3)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=8, n_layer=1, n_head=2, **drop, **tokens)
    )


MODELS: dict[str, Callable[..., PreTrainedModel]] = {"classification": bert, "causal": gpt}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return TrainingArguments(**{**chosen, **changes})


def trainer(model: nn.Module, folder: Path, *, causal: bool = False, **changes: Any) -> DDSTrainer:
    its = {key: changes.pop(key) for key in list(changes) if key in DDS_ARGUMENTS}
    its = {"dds_dev_dataset": sentences(16, 1, causal=causal), **its}
    its = {"train_dataset": sentences(32, 0, causal=causal), "scorer": scorer(), **its}
    return DDSTrainer(model, arguments(folder, **changes), data_collator=default_data_collator, **its)


DDS_ARGUMENTS = (
    "scorer",
    "dds_dev_dataset",
    "dds_dev_batch_size",
    "dds_options",
    "train_dataset",
    "eval_dataset",
    "compute_loss_func",
    "callbacks",
    "compute_metrics",
)


def scorer() -> nn.Module:
    """One that does not begin with even weights."""
    torch.manual_seed(4)
    found = SignalScorer()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def close(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(values(one).values(), values(other).values(), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def own_loop(model: nn.Module, causal: bool, steps: int, micro: int = 1) -> DDS:
    """What DDSTrainer should do: AdamW as the Trainer's, clipped to norm 1, one loss per example."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        lossy = causal_lm_losses if causal else classification_losses
        return lossy(model(**inputs).logits, batch["labels"])

    def loader(count: int, seed: int, size: int, **options: Any) -> DataLoader[Any]:
        examples: Any = sentences(count, seed, causal=causal)
        return DataLoader(examples, size, collate_fn=default_data_collator, **options)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    dds = DDS(model, scorer(), loss_fn, optimizer, loader(16, 1, 8, shuffle=True, drop_last=True), seed=5)
    model.train()
    batches = [batch for _ in range(10) for batch in loader(32, 0, 8)]
    for step in range(steps):
        optimizer.zero_grad()
        for batch in batches[step * micro : (step + 1) * micro]:
            dds.loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dds.step()
    return dds


@pytest.mark.parametrize("task", MODELS)
@pytest.mark.parametrize("micro", [1, 2])
def test_training_is_that_of_a_loop_of_ones_own(task: str, micro: int, tmp_path: Path) -> None:
    causal = task == "causal"
    ours, its = MODELS[task](), MODELS[task]()
    found = trainer(its, tmp_path, causal=causal, gradient_accumulation_steps=micro)
    found.train()
    expected = own_loop(ours, causal, 8 // micro, micro)
    assert found.dds is not None
    assert found.dds.steps == expected.steps == found.state.global_step == 8 // micro
    assert close(its, ours, 1e-6)
    assert close(found.dds.scorer, expected.scorer, 1e-6)
    assert found.dds.optimizer is not found.optimizer
    assert found.record is not None
    assert found.record.skipped is None


class Reader(nn.Module):
    """Scores by the first word, and by a column that the model does not read."""

    columns = ("source",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.sources = nn.Embedding(WORDS, 1), nn.Embedding(2, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.words(batch["input_ids"][:, 0]) + self.sources(batch["source"])).squeeze(1)


def with_sources(examples: list[Example]) -> list[Example]:
    return [{**example, "source": number % 2} for number, example in enumerate(examples)]


def reading(folder: Path, model: nn.Module | None = None, **changes: Any) -> DDSTrainer:
    data = {"train_dataset": with_sources(sentences(32, 0)), "dds_dev_dataset": with_sources(sentences(16, 1))}
    return trainer(model or bert(), folder, **{"scorer": Reader(), **data, "dds_dev_batch_size": 8, **changes})


def test_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    large, small = reading(tmp_path), reading(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    large.train()
    small.train()
    assert large.dds is not None
    assert small.dds is not None
    assert close(large.model, small.model, 2e-5)
    assert close(large.dds.scorer, small.dds.scorer, 2e-5)
    logged = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (large, small)]
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_with_even_weights_it_is_the_trainer(smoothing: float, tmp_path: Path) -> None:
    class Even(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return torch.zeros(len(batch["labels"]))

    ours, plain = bert(), bert()
    trainer(ours, tmp_path, scorer=Even(), label_smoothing_factor=smoothing).train()
    same = arguments(tmp_path, label_smoothing_factor=smoothing)
    Trainer(plain, same, train_dataset=sentences(32, 0), data_collator=default_data_collator).train()
    assert close(ours, plain, 1e-6)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_resumed_training_equals_an_uninterrupted_one(micro: int, tmp_path: Path) -> None:
    """With dropout, in the middle of an epoch, in random order, bit for bit."""
    options = {
        "save_strategy": "steps",
        "save_steps": 3,
        "train_sampling_strategy": "random",
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 8 // micro,
        "gradient_accumulation_steps": micro,
        "dds_options": {"replay": 4},
    }
    whole = reading(tmp_path / "whole", bert(0.1), **options)
    whole.train()
    again = reading(tmp_path / "again", bert(0.1), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-3"))
    assert whole.dds is not None
    assert again.dds is not None
    assert again.dds.steps == whole.dds.steps == 8
    assert close(again.model, whole.model)
    assert close(again.dds.scorer, whole.dds.scorer)


def one_of_two(folder: str) -> None:
    """What each process of the next test does."""
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    found = reading(Path(folder), **changes, save_strategy="epoch")
    found.train()
    assert found.dds is not None
    assert found.dds.world.size == 2
    torch.save([values(found.model), values(found.dds.scorer)], f"{folder}/{found.args.process_index}.pt")


def test_two_processes_equal_one_with_the_joint_batch(tmp_path: Path) -> None:
    two_processes(f"import test_hf; test_hf.one_of_two({str(tmp_path)!r})")
    alone = reading(tmp_path / "alone", gradient_accumulation_steps=1, dds_dev_batch_size=16)
    alone.train()
    assert alone.dds is not None
    for rank in (0, 1):
        assert (tmp_path / f"checkpoint-8/dds_{rank}.pt").exists()
        parts = torch.load(tmp_path / f"{rank}.pt")
        for found, module in zip(parts, (alone.model, alone.dds.scorer), strict=True):
            assert all(torch.allclose(found[name], value, atol=2e-5) for name, value in values(module).items())


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    options = arguments(tmp_path, save_strategy="steps", save_steps=3)
    Trainer(bert(), options, train_dataset=sentences(32, 0), data_collator=default_data_collator).train()
    with pytest.raises(GradsieveError, match=r"checkpoint-8 holds no dds_0\.pt"):
        trainer(bert(), tmp_path).train(resume_from_checkpoint=True)


def test_evaluation_log_and_callbacks(tmp_path: Path) -> None:
    class Listener(TrainerCallback):
        steps = evaluations = 0

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            self.evaluations += 1

    listener = Listener()
    found = reading(
        tmp_path,
        eval_dataset=with_sources(sentences(8, 2)),
        eval_strategy="epoch",
        callbacks=[listener],
        compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
    )
    found.train()
    assert (listener.steps, listener.evaluations) == (8, 2)
    steps = [entry for entry in found.state.log_history if "loss" in entry]
    assert len(steps) == 8
    assert all(1 <= entry["dds_effective_sample_size"] <= 8 and entry["dds_dev_loss"] > 0 for entry in steps)
    assert steps[-1]["dds_skipped"] == 0
    evaluated = [entry for entry in found.state.log_history if "eval_accuracy" in entry]
    assert len(evaluated) == 2
    with torch.no_grad():
        own = found.model.eval()(**default_data_collator(sentences(8, 2))).loss
    assert evaluated[-1]["eval_loss"] == pytest.approx(float(own), rel=1e-5)


def test_bf16_autocast(tmp_path: Path) -> None:
    """The model runs in bfloat16, rewards are measured in float32 and agree with those of a float32 training."""
    rewards = {}
    for bf16 in (True, False):
        model, seen = bert(), set()
        model.classifier.register_forward_hook(lambda _, __, logits: seen.add(logits.dtype))  # noqa: B023
        found = trainer(model, tmp_path, bf16=bf16, max_steps=1, eval_dataset=sentences(8, 2), eval_strategy="steps")
        found.train()
        assert found.record is not None
        assert found.record.skipped is None
        rewards[bf16] = found.record.rewards
        assert seen == ({torch.bfloat16, torch.float32} if bf16 else {torch.float32})
    assert torch.corrcoef(torch.stack([rewards[True], rewards[False]]))[0, 1] > 0.95


def labels_of(shape: tuple[int, ...], classes: int) -> Tensor:
    return torch.where(torch.rand(shape) < 0.3, -100, torch.randint(classes, shape))


@given(st.integers(1, 4), st.integers(2, 7), st.integers(2, 9), st.sampled_from([0.0, 0.2]))
def test_losses_of_a_language_model(examples: int, length: int, words: int, smoothing: float) -> None:
    """Against one word at a time, and against Transformers' own label smoothing."""
    torch.manual_seed(examples * length * words)
    logits, labels = torch.randn(examples, length, words), labels_of((examples, length), words)
    found = causal_lm_losses(logits, labels, smoothing)
    for i in range(examples):
        terms = []
        for t in range(length - 1):
            if labels[i, t + 1] != -100:
                log_prob = logits[i, t].log_softmax(0)
                terms.append(-(1 - smoothing) * log_prob[labels[i, t + 1]] - smoothing * log_prob.mean())
        expected = torch.stack(terms).mean() if terms else torch.tensor(0.0)
        assert torch.allclose(found[i], expected, atol=1e-6)
    assert torch.equal(token_losses(logits[:, :-1], labels[:, 1:], smoothing), found)


def test_losses_are_the_models_own() -> None:
    """Where all examples have as many labels, their mean is what the model returns."""
    torch.manual_seed(3)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            eos_token_id=0,
        )
    )
    ids = torch.randint(1, WORDS, (4, LENGTH))
    for model, labels in ((gpt(), ids), (llama, ids), (bert(), torch.tensor([0, 2, 1, 1]))):
        outputs = model(input_ids=ids, labels=labels)
        assert torch.allclose(example_losses(model, outputs.logits, labels).mean(), outputs.loss, atol=1e-6)
    for labels, count, losses in (
        (torch.rand(4, 3), 3, multi_label_losses),
        (torch.rand(4), 1, regression_losses),
    ):
        model = bert()
        model.config.num_labels = model.num_labels = count
        model.classifier = nn.Linear(8, count)
        outputs = model(input_ids=ids, labels=labels)
        assert torch.allclose(losses(outputs.logits, labels).mean(), outputs.loss, atol=1e-6)
        assert torch.equal(example_losses(model, outputs.logits, labels), losses(outputs.logits, labels))
        with pytest.raises(GradsieveError, match="label_smoothing_factor"):
            example_losses(model, outputs.logits, labels, 0.1)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WORDS, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"hidden": self.layer(nn.functional.one_hot(input_ids, WORDS).float().mean(1))}


class Undeclared(Reader):
    columns = ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dds_dev_dataset": None}, "needs dds_dev_dataset"),
        ({"dds_dev_dataset": iter(())}, "must have a length"),
        ({"dds_dev_dataset": sentences(5, 1)}, "5 examples, fewer than a dev batch of 8 in each of 1 process"),
        ({"dds_options": {"learning_rate": 1}}, "learning_rate.*DDS does not have"),
        ({"scorer": Reader()}, r"reads \['source'\], which train_dataset does not have"),
        ({"compute_loss_func": lambda o, y, num_items_in_batch: o["logits"].mean()}, "one loss per example, shape .8,"),
        ({"model": Headless()}, "Headless returns no logits"),
        ({"scorer": Undeclared(), "train_dataset": with_sources(sentences(32, 0))}, "declare columns = .'source',"),
        ({"train_dataset": [{"input_ids": torch.ones(4).long()}] * 8}, "the batch has no labels"),
    ],
)
def test_bad_set_ups_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GradsieveError, match=message):
        trainer(changes.pop("model", None) or bert(), tmp_path, **changes).train()


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    def per_example(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return classification_losses(outputs["logits"], labels)

    ours, its = bert(), bert()
    trainer(ours, tmp_path, compute_loss_func=per_example).train()
    trainer(its, tmp_path).train()
    assert close(ours, its)
