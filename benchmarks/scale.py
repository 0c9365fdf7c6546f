"""The figures of docs/scale.md: passes, bytes and seconds, counted at sizes that a laptop holds.

Seconds are those of the processor, so that other work on the machine does not count.

python benchmarks/scale.py passes memory ring store sampler
python benchmarks/scale.py score --rows 100000
torchrun --nproc-per-node 2 benchmarks/scale.py network
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from gradsieve import DDS, MLPScorer, ScoreSampler

BATCH, DEV, FEATURES, CLASSES = 64, 32, 64, 10
Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch_of(size: int) -> Batch:
    return torch.randn(size, FEATURES), torch.randint(CLASSES, (size,))


def network_of(width: int = 128) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def size_of(model: nn.Module) -> int:
    """Bytes of the parameters."""
    return sum(p.nbytes for p in model.parameters())


def take(dds: DDS, optimizer: torch.optim.Optimizer, batch: Batch, low: bool = False) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = dds.loss(batch)
    loss.backward()
    optimizer.step()
    dds.step()


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "scorer of the example alone": {"scorer": lambda: MLPScorer(FEATURES)},
    "last-layer alignment": {"alignment": "last_layer"},
    "last-layer alignment, every 16th step": {"alignment": "last_layer", "update_every": 16, "replay": 32},
    "default, bf16 autocast": {"low": True},
}


def passes(steps: int = 32) -> dict[str, tuple[float, float]]:
    """Forward and backward passes for each training example and step, on a dev batch half as large as a batch."""
    found = {}
    for name, given in SETTINGS.items():
        options = dict(given)
        model, low, seen = network_of(), options.pop("low", False), Counter[str]()

        def listen(module: nn.Module, inputs: Any, output: Tensor, seen: Counter[str] = seen) -> None:
            seen["forward"] += len(output)
            if output.requires_grad:
                output.register_hook(lambda g: seen.update(backward=len(g)))

        model[0].register_forward_hook(listen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scorer = options.pop("scorer", lambda: None)()
        dds = DDS(model, scorer, loss_fn, optimizer, [batch_of(DEV)], **options)
        for step in range(16 + steps):
            if step == 16:
                seen.clear()
            take(dds, optimizer, batch_of(BATCH), low)
        found[name] = (seen["forward"] / steps / BATCH, seen["backward"] / steps / BATCH)
        print(f"{name:30} forward {found[name][0]:.3f}  backward {found[name][1]:.3f}")
    return found


def memory(width: int = 1024) -> dict[str, float]:
    """Copies of the parameters beyond plain training, on a model whose activations hardly count."""
    from gradsieve.bench.timing import Step, peak_memory

    def plain() -> Step:
        model = network_of(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = batch_of(4)

        def step() -> None:
            optimizer.zero_grad()
            loss_fn(model, batch).mean().backward()
            optimizer.step()

        return Step(step)

    def with_dds() -> Step:
        model = network_of(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dds, batch = DDS(model, None, loss_fn, optimizer, [batch_of(4)]), batch_of(4)
        return Step(lambda: take(dds, optimizer, batch))

    unit, device = size_of(network_of(width)), torch.device("cpu")
    model = network_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dds = DDS(model, None, loss_fn, optimizer, [batch_of(DEV)])
    take(dds, optimizer, batch_of(BATCH))
    after = sum(v.nbytes for v in dds.agreement.direction.values()) / size_of(model)
    dds.loss(batch_of(BATCH))
    assert dds._turn is not None
    within = after + sum(v.nbytes for v in dds._turn.theta_prev.values()) / size_of(model)
    found = {
        "plain training at its peak": peak_memory(plain, device) / unit,
        "with DDS at its peak": peak_memory(with_dds, device) / unit,
        "DDS's own after step()": after,
        "DDS's own after loss()": within,
    }
    for name, copies in found.items():
        print(f"{name:30} {copies:.2f} copies of the parameters")
    return found


def ring() -> dict[str, int]:
    """Bytes of 32 lessons."""
    found = {}
    for name, scorer in (("signals only", None), ("reads the batch", MLPScorer(FEATURES))):
        model = network_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dds = DDS(model, scorer, loss_fn, optimizer, [batch_of(DEV)], replay=32)
        for _ in range(40):
            take(dds, optimizer, batch_of(BATCH))
        assert dds.learner.ring is not None
        found[name] = dds.learner.ring.bytes
        print(f"{name:30} {found[name]:,} bytes, {found[name] / 32 / BATCH:.0f} for each example of a lesson")
    return found


def store(groups: int = 8) -> dict[str, tuple[int, float]]:
    """Bytes of the decayed gradients of `groups` groups, and milliseconds of one observation."""
    from gradsieve.gradients import GradientStore

    gradients = [torch.randn_like(p) for p in network_of(1024).parameters()]
    count, found = sum(g.numel() for g in gradients), {}
    kinds: dict[str, dict[str, Any]] = {
        "float32": {},
        "bfloat16": {"dtype": torch.bfloat16},
        "projection to 65,536": {"projection": 65_536},
    }
    for name, options in kinds.items():
        its = GradientStore(groups, **options)
        its.add(0, gradients)
        start = time.process_time()
        for _ in range(10):
            its.add(0, gradients)
        milliseconds = 100 * (time.process_time() - start)
        assert its.vectors is not None
        held = its.vectors.nbytes + (0 if its._buckets is None else its._buckets.nbytes)
        found[name] = (held, milliseconds)
        print(f"{name:30} {held:,} bytes for {groups} groups of {count:,} parameters; {milliseconds:.1f} ms")
    return found


def sampler(rows: int = 100_000) -> dict[str, float]:
    """Bytes for each of `rows` examples, held and at the peak of a scoring anew; seconds of that; of a draw of 64."""
    from gradsieve.bench.timing import Step, peak_memory

    its = ScoreSampler(TensorDataset(torch.randn(rows, 1)), MLPScorer(1), batch_size=BATCH)
    found = {"bytes at the peak": peak_memory(lambda: Step(its.refresh), torch.device("cpu"), steps=2) / rows}
    start = time.process_time()
    its.refresh()
    found["seconds to score anew"] = time.process_time() - start
    start = time.process_time()
    for _ in range(1000):
        its._draw(BATCH)
    found["seconds of a draw"] = (time.process_time() - start) / 1000
    assert its._cumulative is not None
    found["bytes held"] = its._cumulative.nbytes / rows
    for name, figure in found.items():
        print(f"{name:30} {figure:.3g}, {rows:,} examples")
    return found


def score(rows: int) -> dict[str, float]:
    """Seconds and bytes of `gradsieve score` on that many 8 x 8 images in a Parquet file, by two kinds of scorer."""
    from contextlib import redirect_stdout
    from io import StringIO

    from datasets import disable_progress_bars
    from rich.console import Console

    from gradsieve.images.use import score_run
    from gradsieve.runs.progress import Progress
    from gradsieve.tasks import TASKS, recipe_for

    disable_progress_bars()
    found, device = {}, torch.device("cpu")
    common = [
        "model.name=small-cnn",
        "data.size=8",
        "steps=20",
        "evaluate_every=20",
        "optimizer.average=0.0",
        "data.workers=0",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "few/train.parquet", 500)
        write_images(folder / "few/test.parquet", 100)
        write_images(folder / "many/rows.parquet", rows)
        for kind in ("conv+label", "signal"):
            recipe = recipe_for("dds", "images", [*common, f"scorer.kind={kind}"])
            with redirect_stdout(StringIO()), Progress(Console()) as progress:
                settings: dict[str, Any] = {"resume": False, "device": device, "progress": progress}
                TASKS["images"].train(recipe, "dds", seed=0, data=folder / "few", out=folder / kind, **settings)
            start = time.process_time()
            score_run(folder / kind, folder / f"{kind}.parquet", data=folder / "many", device=device)
            found[kind] = time.process_time() - start
            size = (folder / f"{kind}.parquet").stat().st_size
            print(f"{kind:30} {rows:,} rows in {found[kind]:.1f} s; the file has {size / rows:.1f} bytes a row")
    return found


def write_images(file: Path, rows: int) -> None:
    """PNGs of noise, each different from the others."""
    from io import BytesIO

    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    file.parent.mkdir(exist_ok=True)
    pictures = []
    for pixels in torch.randint(256, (rows, 8, 8, 3), dtype=torch.uint8).numpy():
        Image.fromarray(pixels).save(content := BytesIO(), "PNG")
        pictures.append({"bytes": content.getvalue(), "path": None})
    table = {"image": pictures, "label": [row % CLASSES for row in range(rows)]}
    parquet.write_table(pyarrow.table(table), file)


COLLECTIVES = {
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "all_gather": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
}


def network(steps: int = 16) -> None:
    """What one process hands to collective operations in a step, by kind; under torchrun, two processes or more."""
    dist.init_process_group("gloo")
    sent, last = Counter[str](), dist.get_world_size() > 1

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*arguments: Any, **more: Any) -> Any:
            both = "gather" in name or "scatter" in name  # (output, input)
            sent[COLLECTIVES[name]] += (more["input"] if "input" in more else arguments[1 if both else 0]).nbytes
            return call(*arguments, **more)

        return collective

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, counted(name, getattr(dist, name)))
    assert last, "start it by torchrun --nproc-per-node 2"
    for how in ("DDP", "FSDP2"):
        for given in ("plain", "default", "last-layer alignment, every 16th step"):
            model = wrapped(network_of(), how)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dds = DDS(model, None, loss_fn, optimizer, [batch_of(DEV)], **SETTINGS.get(given, {}))
            for step in range(16 + steps):
                if step == 16:
                    sent.clear()
                if given == "plain":
                    optimizer.zero_grad()
                    loss_fn(model, batch_of(BATCH)).mean().backward()
                    optimizer.step()
                else:
                    take(dds, optimizer, batch_of(BATCH))
            if dist.get_rank() == 0:
                kinds = ", ".join(f"{name} {size / steps:,.0f}" for name, size in sorted(sent.items()))
                parameters = sum(p.numel() for p in model.parameters())
                print(f"{how:6} {given:26} {parameters:,} parameters; bytes a step: {kinds or 'none from Python'}")
    dist.destroy_process_group()


def wrapped(model: nn.Sequential, how: str) -> nn.Module:
    if how == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, reshard_after_forward=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"passes": passes, "memory": memory, "ring": ring, "store": store, "sampler": sampler, "network": network}
    parser.add_argument("parts", nargs="+", choices=[*parts, "score"])
    parser.add_argument("--rows", type=int, default=100_000, help="for score")
    given = parser.parse_args()
    torch.manual_seed(0)
    for name in given.parts:
        if name == "score":
            score(given.rows)
        else:
            parts[name]()  # type: ignore[operator]


if __name__ == "__main__":
    main()
