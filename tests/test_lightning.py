"""DDSCallback: Lightning with DDS inside does what a loop of one's own does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import two_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from gradsieve import DDS, GradsieveError, MLPScorer

pl = pytest.importorskip("lightning.pytorch", reason="needs gradsieve[lightning]")

from gradsieve.integrations.lightning import DDSCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def scorer() -> nn.Module:
    torch.manual_seed(4)
    found = MLPScorer(6, 3, hidden=8)
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found


def data(count: int, seed: int) -> TensorDataset:
    chance = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=chance), torch.randint(3, (count,), generator=chance))


def dev_loader() -> DataLoader[Any]:
    return DataLoader(data(16, 1), 8, shuffle=True)


class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.calls = 0

    def losses(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.losses(batch)
        self.calls += 1
        self.log("train_loss", losses.mean())
        return losses

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(
    folder: Path,
    module: Any,
    *,
    size: int = 8,
    callback: DDSCallback | None = None,
    ckpt: str | None = None,
    sampler: Callable[[TensorDataset], Sampler[int]] | None = None,
    **options: Any,
) -> DDSCallback:
    callback = callback or DDSCallback(dev_loader(), scorer(), {"seed": 5})
    trainer = pl.Trainer(
        **{
            "default_root_dir": folder,
            "accelerator": "cpu",
            "max_epochs": 2,
            "callbacks": [callback],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    train = data(32, 0)
    trainer.fit(module, DataLoader(train, size, sampler=sampler and sampler(train)), ckpt_path=ckpt)
    module.metrics = trainer.callback_metrics
    return callback


def own_loop(steps: int = 8, size: int = 8, micro: int = 1, clip: float | None = None) -> tuple[nn.Module, DDS]:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    dds = DDS(model, scorer(), loss_fn, optimizer, dev_loader(), seed=5)
    batches = [batch for _ in range(2) for batch in DataLoader(data(32, 0), size)]
    for step in range(steps):
        optimizer.zero_grad()
        for batch in batches[step * micro : (step + 1) * micro]:
            dds.loss(batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        dds.step()
    return model, dds


def close(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
        ({"size": 4, "accumulate_grad_batches": 2}, {"size": 4, "micro": 2}),
    ],
)
def test_training_is_that_of_a_loop_of_ones_own(options: dict[str, Any], loop: dict[str, Any], tmp_path: Path) -> None:
    module = Module()
    callback = fit(tmp_path, module, **options)
    model, dds = own_loop(**loop)
    assert callback.dds is not None
    assert callback.dds.steps == dds.steps == 8
    assert close(module.net, model, 1e-6)
    assert close(callback.dds.scorer, dds.scorer, 1e-6)
    assert "training_step" not in module.__dict__


def test_micro_batches_equal_one_batch(tmp_path: Path) -> None:
    large, small = Module(), Module()
    fit(tmp_path, large)
    fit(tmp_path, small, size=2, accumulate_grad_batches=4)
    assert close(large.net, small.net, 2e-5)
    assert float(small.metrics["dds_loss"]) == pytest.approx(float(large.metrics["dds_loss"]), rel=1e-4)


def test_logs_are_those_of_training(tmp_path: Path) -> None:
    """`training_step` runs for dev gradient and rewards too, but is heard only once in each step."""
    module, means = Module(), []
    losses = module.losses

    def noted(batch: Any) -> Tensor:
        found = losses(batch)
        means.append(float(found.detach().mean()))
        return found

    module.losses = noted  # type: ignore[method-assign]
    fit(tmp_path, module)
    assert module.calls == 3 * 8  # training, dev, reward
    assert float(module.metrics["train_loss"]) == pytest.approx(means[-3])
    assert float(module.metrics["dds_dev_loss"]) == pytest.approx(means[-2])
    assert 1 <= float(module.metrics["dds_effective_sample_size"]) <= 8


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    ended = {}
    for name, start in (("whole", None), ("again", str(tmp_path / "epoch=0.ckpt"))):
        module, callback = Module(), DDSCallback(dev_loader(), scorer(), {"seed": 5})
        saver = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        fit(tmp_path, module, callback=callback, ckpt=start, callbacks=[callback, saver], enable_checkpointing=True)
        assert callback.dds is not None
        assert callback.dds.steps == 8
        ended[name] = nn.ModuleList([module.net, callback.dds.scorer])
    assert close(ended["whole"], ended["again"])


def test_bf16(tmp_path: Path) -> None:
    callback = fit(tmp_path, Module(), precision="bf16-mixed")
    assert callback.record is not None
    assert callback.record.skipped is None


def one_of_two(folder: str) -> None:
    """What each process of the next test does. Lightning's own sampler would shuffle; dev is left to it."""
    rank = int(os.environ["RANK"])
    callback = DDSCallback(DataLoader(data(16, 1), 8), scorer(), {"seed": 5})
    module = Module()
    fit(
        Path(folder),
        module,
        size=4,
        callback=callback,
        sampler=lambda train: DistributedSampler(train, 2, rank, shuffle=False),
        strategy=pl.strategies.DDPStrategy(process_group_backend="gloo"),
        devices=2,
    )
    assert callback.dds is not None
    assert callback.dds.world.size == 2
    torch.save([module.net.state_dict(), callback.dds.scorer.state_dict()], f"{folder}/{rank}.pt")


def test_two_processes_equal_one_with_the_joint_batch(tmp_path: Path) -> None:
    two_processes(f"import test_lightning; test_lightning.one_of_two({str(tmp_path)!r})")
    module, callback = Module(), DDSCallback(DataLoader(data(16, 1), 16), scorer(), {"seed": 5})
    fit(tmp_path, module, callback=callback)
    assert callback.dds is not None
    for rank in (0, 1):
        parts = torch.load(tmp_path / f"{rank}.pt")
        for found, whole in zip(parts, (module.net, callback.dds.scorer), strict=True):
            assert all(torch.allclose(found[name], value, atol=2e-5) for name, value in whole.state_dict().items())


def test_a_dict_will_do(tmp_path: Path) -> None:
    class Dict(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.losses(batch), "size": len(batch[0])}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert outputs["size"] == 8

    module, plain = Dict(), Module()
    fit(tmp_path, module)
    fit(tmp_path, plain)
    assert close(module.net, plain.net)


class Reduced(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(batch).mean()


class Manual(Module):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "message"), [(Reduced, "one loss per example, shape .B,., but returned shape"), (Manual, "automatic")]
)
def test_bad_set_ups_are_refused(module: Callable[[], Any], message: str, tmp_path: Path) -> None:
    its = module()
    with pytest.raises(GradsieveError, match=message):
        fit(tmp_path, its)
    assert "training_step" not in its.__dict__
