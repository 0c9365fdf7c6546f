"""Data, models, the loop."""

from pathlib import Path

import pytest
import torch

from gradsieve import GradsieveError
from gradsieve.demo import digits_budget
from gradsieve.images import data
from gradsieve.images.data import cifar10_4k, digits, with_label_noise
from gradsieve.images.models import WideResNet
from gradsieve.images.train import train, training_set

CIFAR10 = Path(__file__).parents[2] / "shared/data/cifar10/cifar-10-batches-bin"


def test_digits_splits_share_nothing_and_follow_the_seed() -> None:
    splits = digits(seed=1)
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (1100, 100, 597)
    everything = torch.cat([s.images for s in (splits.train, splits.dev, splits.test)])
    assert float(everything.sum()) == float(digits(seed=2).train.images.sum()) + sum(
        float(s.images.sum()) for s in (digits(seed=2).dev, digits(seed=2).test)
    )
    assert torch.equal(splits.train.images, digits(seed=1).train.images)
    assert not torch.equal(splits.train.images, digits(seed=2).train.images)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
def test_label_noise_says_what_it_damaged(share: float) -> None:
    clean = digits(seed=0)
    noisy = with_label_noise(clean, share, seed=0)
    assert torch.equal(noisy.damaged, noisy.train.labels != clean.train.labels)
    assert int(noisy.damaged.sum()) == round(share * 1100)
    assert torch.equal(noisy.dev.labels, clean.dev.labels)


def test_what_each_method_may_train_on() -> None:
    splits = with_label_noise(digits(seed=0), 0.4, seed=0)
    sizes = {m: len(training_set(m, splits)) for m in ("uniform", "uniform+dev", "oracle", "oracle+dev", "dds")}
    assert sizes == {"uniform": 1100, "uniform+dev": 1200, "oracle": 660, "oracle+dev": 760, "dds": 1100}


def test_wide_resnets_have_the_published_sizes() -> None:
    sizes = {(28, 2): 1.47e6, (28, 10): 36.5e6}
    for (depth, k), size in sizes.items():
        with torch.device("meta"):
            model = WideResNet(depth, k)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(size, rel=0.01)
    with pytest.raises(ValueError, match="6n \\+ 4"):
        WideResNet(15, 1)


def test_dds_beats_plain_training_on_wrong_labels() -> None:
    splits = with_label_noise(digits(seed=0), 0.4, seed=0)
    plain = train("uniform+dev", splits, digits_budget(1000), seed=0)
    dds = train("dds", splits, digits_budget(1000), seed=0)
    assert dds.last > plain.last + 5
    assert sum(dds.right[-100:]) > 2 * sum(dds.wrong[-100:])
    assert dds.skipped == 0


def test_unknown_methods_are_named() -> None:
    with pytest.raises(GradsieveError, match=r"'magic'.*uniform"):
        train("magic", digits(seed=0), digits_budget(1), seed=0)


@pytest.mark.skipif(not CIFAR10.is_dir(), reason="needs CIFAR-10 in ../shared/data")
def test_cifar10_as_the_paper_splits_it() -> None:
    splits = cifar10_4k(CIFAR10)
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (3600, 400, 10000)
    assert splits.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert abs(float(splits.train.images.mean())) < 0.05


def test_a_missing_or_damaged_cifar_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradsieveError, match=r"data_batch_1\.bin is missing"):
        cifar10_4k(tmp_path)
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * data.CIFAR10_RECORD)
    with pytest.raises(GradsieveError, match=r"data_batch_1\.bin is damaged"):
        cifar10_4k(tmp_path)
