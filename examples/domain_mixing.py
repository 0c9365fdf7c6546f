"""Three sources of digits, one of them harmful: GroupDDS finds out which, while the model trains.

- `scans`: rightly labelled, but few.
- `faxes`: many, rightly labelled, with salt and pepper on them.
- `guesses`: many, with the labels of other digits.

The target is a fourth group: a small trusted dev set, never trained on, whose gradient tells what helps.

python examples/domain_mixing.py
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from gradsieve import GroupDDS

SOURCES = ("scans", "faxes", "guesses")
DEV = len(SOURCES)
AVAILABLE = torch.tensor([1, 1, 1, 0])  # a step may take any source, but not the dev set

Examples = tuple[Tensor, Tensor]


def load() -> tuple[list[Examples], Examples, Examples]:
    """The sources, the dev set and the test set: images (N, 64) and labels (N,)."""
    generator = torch.Generator().manual_seed(0)
    bunch = load_digits()
    x, y = torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)
    order = torch.randperm(len(x), generator=generator)
    scans, faxes, guesses, dev, test = order.split([100, 500, 500, 100, len(x) - 1200])
    specks = torch.rand(x.shape, generator=generator)
    fax = torch.where(specks < 0.05, 0.0, torch.where(specks > 0.95, 1.0, x))
    sources = [(x[scans], y[scans]), (fax[faxes], y[faxes]), (x[guesses], (y[guesses] + 3) % 10)]
    return sources, (x[dev], y[dev]), (x[test], y[test])


def train(*, select: bool, steps: int = 1500) -> tuple[float, list[float]]:
    """Test accuracy, and how often each source was drawn in the last third; by equal turns without `select`."""
    torch.manual_seed(0)
    sources, dev, (test_x, test_y) = load()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    dds = GroupDDS(None, num_groups=4, target_group=DEV, items_between=10, updates=5, decay=(0.9, 1.0))
    dds.scorer_optimizer.param_groups[0]["lr"] = 3e-3  # the paper's 0.0001 is for weeks of training
    drawn = torch.zeros(len(SOURCES))

    def gradients(x: Tensor, y: Tensor) -> list[Tensor]:
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for step in range(steps):
        group = int(dds.draw(AVAILABLE)) if select else step % len(SOURCES)
        if select:
            dds.observe(DEV, gradients(*dev))
        dds.observe(group, gradients(*sources[group]))
        optimizer.step()
        dds.step()
        drawn[group] += step >= steps * 2 // 3
    accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    return 100 * accuracy, (drawn / drawn.sum()).tolist()


def main() -> None:
    for name, select in (("equal turns", False), ("GroupDDS", True)):
        accuracy, shares = train(select=select)
        drawn = ", ".join(f"{source} {share:.0%}" for source, share in zip(SOURCES, shares, strict=True))
        print(f"{name}: test accuracy {accuracy:.1f}%; drawn in the last third: {drawn}")


if __name__ == "__main__":
    main()
