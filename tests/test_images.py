"""Data, damage, models, batches, and what each method may train on."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradsieve import GradsieveError
from gradsieve.images import data
from gradsieve.images.augment import normalized, pad_crop_flip
from gradsieve.images.damage import flip_noise, long_tail, uniform_noise
from gradsieve.images.data import ImageSet, Memory, Splits, cifar10, digits
from gradsieve.images.methods import METHODS, training_set
from gradsieve.images.models import ResNet50, WideResNet, build_model
from gradsieve.images.recipe import OptimizerSettings
from gradsieve.images.stream import InOrder, Shuffled, Stream
from gradsieve.images.train import learning_rate_factor, moving_average

CIFAR10 = Path(__file__).parents[2] / "shared/data/cifar10"
CPU = torch.device("cpu")


def tiny(count: int = 23, classes: int = 4, size: int = 6) -> Splits:
    source = Memory(torch.randint(256, (count, 3, size, size), dtype=torch.uint8), torch.arange(count) % classes)
    everything = ImageSet.whole(source)
    return Splits(everything[:-8], everything[-8:-4], everything[-4:], classes, (0.0,) * 3, (1.0,) * 3)


def test_digits_splits_share_nothing_and_follow_the_seed() -> None:
    splits = digits(seed=1)
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (1100, 100, 597)
    rows = torch.cat([s.rows for s in (splits.train, splits.dev, splits.test)])
    assert rows.sort().values.tolist() == list(range(1797))
    assert torch.equal(splits.train.rows, digits(seed=1).train.rows)
    assert not torch.equal(splits.train.rows, digits(seed=2).train.rows)
    assert splits.checksum == digits(seed=2).checksum


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6])
@pytest.mark.parametrize("noise", [uniform_noise, flip_noise])
def test_label_noise_says_what_it_damaged(noise, share: float) -> None:  # type: ignore[no-untyped-def]
    clean = digits(seed=0)
    noisy = noise(clean, share, seed=0)
    assert torch.equal(noisy.damaged, noisy.train.labels != clean.train.labels)
    assert int(noisy.damaged.sum()) == round(share * 1100)
    assert torch.equal(noisy.dev.labels, clean.dev.labels)
    if noise is flip_noise:
        changed = noisy.damaged
        assert torch.equal(noisy.train.labels[changed], (clean.train.labels[changed] + 1) % 10)


def test_a_long_tail_thins_the_classes_and_says_what_is_gone() -> None:
    clean = digits(seed=0)
    thin = long_tail(clean, 20, seed=0)
    counts = torch.bincount(thin.train.labels, minlength=10).tolist()
    assert counts[0] == int((clean.train.labels == 0).sum())
    assert counts[0] / counts[9] == pytest.approx(20, rel=0.2)
    assert counts == sorted(counts, reverse=True)
    assert thin.removed is not None
    assert thin.damaged is not None
    assert torch.equal(clean.train.rows[~thin.removed], thin.train.rows)
    assert len(thin.damaged) == len(thin.train)
    assert not thin.damaged.any()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: uniform_noise(s, 1.5, seed=0), "between 0 and 1"),
        (lambda s: flip_noise(s, -0.1, seed=0), "between 0 and 1"),
        (lambda s: long_tail(s, 0.5, seed=0), "at least 1"),
    ],
)
def test_impossible_damage_is_refused(damage, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GradsieveError, match=message):
        damage(digits(seed=0))


def test_what_each_method_may_train_on() -> None:
    splits = uniform_noise(digits(seed=0), 0.4, seed=0)
    sizes = {method: len(training_set(method, splits)) for method in METHODS}
    assert sizes == {**dict.fromkeys(METHODS, 1100), "uniform+dev": 1200, "oracle": 660}
    with pytest.raises(GradsieveError, match="no damage is known"):
        training_set("oracle", digits(seed=0))


@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 99)
)
def test_pad_crop_flip_equals_one_image_after_the_other(
    count: int, channels: int, height: int, width: int, pad: int, seed: int
) -> None:
    images = torch.randn(count, channels, height, width)
    fast = pad_crop_flip(images, pad=pad, generator=torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    down = torch.randint(2 * pad + 1, (count, 1), generator=generator)
    right = torch.randint(2 * pad + 1, (count, 1), generator=generator)
    flip = torch.rand((count, 1), generator=generator) < 0.5
    for i in range(count):
        padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad)
        padded[:, pad : pad + height, pad : pad + width] = images[i]
        crop = padded[:, down[i] : down[i] + height, right[i] : right[i] + width]
        assert torch.equal(fast[i], crop.flip(2) if flip[i] else crop)


def test_pixels_are_normalized_by_channel() -> None:
    pixels = torch.full((2, 2, 1, 1), 10, dtype=torch.uint8)
    x = normalized(pixels, torch.tensor([10.0, 0.0]), torch.tensor([1.0, 5.0]))
    assert x.flatten(1).tolist() == [[0.0, 2.0], [0.0, 2.0]]


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 40))
def test_batches_are_a_function_of_the_step_and_a_pass_sees_each_example_once(
    count: int, size: int, start: int
) -> None:
    images = ImageSet.whole(Memory(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count)))
    batches = Shuffled(images, size, 7)
    first_pass = [batches[step][2] for step in range(batches.per_pass)]
    seen = torch.cat(first_pass)
    assert len(seen.unique()) == len(seen) == count - count % min(size, count)
    stream = Stream(Shuffled(images, size, 7), lambda pixels, step: pixels.float(), CPU)
    stream.load_state_dict({"step": start})
    for (_, labels, index), step in zip(stream, range(start, start + 5), strict=False):
        assert torch.equal(index, batches[step][2])
        assert torch.equal(labels, index)


def test_shards_are_read_group_by_group() -> None:
    source = Memory(torch.zeros(4000, 1, 1, 1, dtype=torch.uint8), torch.zeros(4000, dtype=torch.long))
    source.shards = torch.arange(4000) // 100
    order = torch.cat([Shuffled(ImageSet.whole(source), 100, 0)[step][2] for step in range(40)])
    assert len(order.unique()) == 4000
    groups = [set((part // 100).tolist()) for part in order[:3200].split(1600)]
    assert [len(group) for group in groups] == [16, 16]
    assert groups[0].isdisjoint(groups[1])
    assert not torch.equal(order, order.sort().values)


def test_workers_read_the_same_batches() -> None:
    splits = tiny()

    def first(workers: int) -> list[torch.Tensor]:
        stream = Stream(Shuffled(splits.train, 4, 1), lambda pixels, step: pixels + step, CPU, workers)
        return [x for (x, _, _), _ in zip(stream, range(6), strict=False)]

    for a, b in zip(first(0), first(2), strict=True):
        assert torch.equal(a, b)


def test_a_worker_reports_an_unreadable_image_without_a_traceback() -> None:
    splits = tiny()

    class Broken(Memory):
        def read(self, rows, generator):  # type: ignore[no-untyped-def]
            raise GradsieveError("image 7 cannot be read.")

    broken = ImageSet(Broken(*vars(splits.train.source).values()), splits.train.rows, splits.train.labels)  # type: ignore[arg-type]
    stream = Stream(InOrder(broken, 4), lambda pixels, step: pixels, CPU, workers=1)
    with pytest.raises(GradsieveError, match=r"^image 7 cannot be read\.$"):
        next(iter(stream))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_models_have_the_published_sizes() -> None:
    with torch.device("meta"):
        assert parameters(WideResNet(28, 2)) == pytest.approx(1.47e6, rel=0.005)
        assert parameters(WideResNet(28, 10)) == pytest.approx(36.5e6, rel=0.005)
        assert parameters(ResNet50()) == 25_557_032
    with pytest.raises(GradsieveError, match="6n \\+ 4"):
        WideResNet(15, 1)


@pytest.mark.parametrize("name", ["mlp", "small-cnn", "wrn-10-1", "wrn-16-1", "resnet50"])
def test_models_by_name(name: str) -> None:
    model = build_model(name, shape=(3, 32, 32), num_classes=7)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\ndef small(num_classes):\n    return nn.Linear(4, num_classes)\nnothing = lambda n: 3\n"
    )
    monkeypatch.chdir(tmp_path)
    assert build_model("mynets:small", shape=(1, 2, 2), num_classes=3)(torch.randn(2, 4)).shape == (2, 3)
    for name, message in (
        ("mynets:absent", "absent"),
        ("nowhere:small", "nowhere"),
        ("mynets:nothing", "must return a torch"),
        ("wrn-9", "unknown model 'wrn-9'"),
    ):
        with pytest.raises(GradsieveError, match=message):
            build_model(name, shape=(1, 2, 2), num_classes=3)


def test_the_learning_rate_climbs_and_falls() -> None:
    settings = OptimizerSettings(warmup=10)
    factors = [learning_rate_factor(t, 100, settings) for t in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == pytest.approx(factors[9], rel=0.02)
    assert factors[50] == pytest.approx(0.5)
    assert factors[99] < 0.001
    level = OptimizerSettings(cosine=False)
    assert {learning_rate_factor(t, 100, level) for t in range(100)} == {1.0}


def test_the_moving_average_covers_batchnorm_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    average = moving_average(model, 0.9)
    assert average is not None
    expected = None
    for _ in range(3):
        model(torch.randn(5, 3, 2, 2) + 3)
        average.update_parameters(model)
        now = model[1].running_mean.clone()  # type: ignore[union-attr,operator]
        expected = now if expected is None else 0.9 * expected + 0.1 * now
    torch.testing.assert_close(average.module[1].running_mean, expected)  # type: ignore[index]
    assert moving_average(model, 0.0) is None


def test_settings_can_be_chosen_without_the_test_set() -> None:
    plain, aside = digits(seed=3), digits(seed=3, held_out=True)
    assert torch.equal(torch.cat([aside.train.rows, aside.test.rows]), plain.train.rows)
    assert set(aside.test.rows.tolist()).isdisjoint(plain.test.rows.tolist())
    with pytest.raises(GradsieveError, match="no training image aside"):
        cifar10(Path(), "full", held_out=True)


@pytest.mark.skipif(not CIFAR10.is_dir(), reason="needs CIFAR-10 in ../shared/data")
def test_cifar10_as_the_paper_splits_it() -> None:
    splits = cifar10(CIFAR10, "4k")
    assert (len(splits.train), len(splits.dev), len(splits.test)) == (3600, 400, 10000)
    assert splits.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    pixels = splits.train.read(torch.arange(3600))[0]
    x = normalized(pixels, torch.tensor(splits.mean), torch.tensor(splits.deviation))
    assert x.mean().abs().item() < 0.05
    assert x.std().item() == pytest.approx(1, abs=0.05)
    aside = cifar10(CIFAR10, "4k", held_out=True)
    assert torch.equal(aside.train.rows, splits.train.rows)
    assert aside.test.rows.tolist() == list(range(4000, 10000))
    assert aside.test.source is aside.train.source
    with pytest.raises(GradsieveError, match=r"lacks data_batch_2\.bin, .*data_batch_5\.bin"):
        cifar10(CIFAR10, "full")


def test_the_full_setting_takes_all_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    md5 = {}
    for number, name in enumerate(data.CIFAR10_MD5):
        raw = b"".join(bytes([number]) + bytes([number * 10 + i]) * 3072 for i in range(10))
        (tmp_path / name).write_bytes(raw)
        md5[name] = hashlib.md5(raw).hexdigest()
    monkeypatch.setattr(data, "CIFAR10_MD5", md5)
    splits = cifar10(tmp_path, "full")
    assert splits.train.labels.tolist() == [n for n in range(5) for _ in range(10)][:45]
    assert splits.dev.labels.tolist() == [4] * 5
    assert splits.train.read(torch.tensor([12]))[0].unique().tolist() == [12]
    assert splits.test.labels.tolist() == [5] * 10


def test_a_missing_damaged_or_truncated_cifar_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradsieveError, match=r"lacks data_batch_1\.bin, test_batch\.bin.*gradsieve download"):
        cifar10(tmp_path, "4k")
    (tmp_path / "test_batch.bin").touch()
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * data.CIFAR10_RECORD)
    with pytest.raises(GradsieveError, match=r"data_batch_1\.bin is damaged"):
        cifar10(tmp_path, "4k")
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(GradsieveError, match=r"data_batch_1\.bin is cut short"):
        cifar10(tmp_path, "4k")
