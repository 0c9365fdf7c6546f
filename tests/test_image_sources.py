"""Image sets that do not fit memory: folders, shards, tables; the views of their pictures; the download."""

import hashlib
import io
import pickle
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradsieve import GradsieveError
from gradsieve.images import download
from gradsieve.images.data import CIFAR10_FOLDER, ImageSet, Splits
from gradsieve.images.download import download_cifar10
from gradsieve.images.files import Folder, Shards, folder_splits, shard_splits
from gradsieve.images.scores import ids, read_scores
from gradsieve.images.tables import Table, detect, image_splits, table_splits
from gradsieve.images.view import Pictures, decode, evaluation_view, random_box, training_view

SIZE = 8
KINDS = [("RGB", "jpeg"), ("L", "jpeg"), ("CMYK", "jpeg"), ("P", "png"), ("I;16", "png"), ("RGBA", "png"), ("1", "png")]


def noise(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    pixels = random.Random(seed).randbytes(width * height * 3)
    image = Image.frombytes("RGB", (width, height), pixels)
    return (
        image.convert("L").convert("I").point(lambda v: v * 256).convert("I;16")
        if mode == "I;16"
        else image.convert(mode)
    )


def encoded(seed: int) -> tuple[str, bytes]:
    """A picture of some shape, mode and format, and its extension."""
    mode, kind = KINDS[seed % len(KINDS)]
    file = io.BytesIO()
    noise(9 + seed % 5, 7 + seed % 11, seed, mode).save(file, kind)
    return {"jpeg": "jpg"}.get(kind, kind), file.getvalue()


def make_folder(directory: Path, **splits: Sequence[int]) -> Path:
    """Splits with so many files in class a, class b and so on."""
    for split, counts in splits.items():
        for label, count in enumerate(counts):
            folder = directory / split / "abcdefgh"[label]
            folder.mkdir(parents=True)
            for i in range(count):
                extension, raw = encoded(100 * label + i + len(split))
                (folder / f"{i:03}.{extension if i % 2 else extension.upper()}").write_bytes(raw)
    return directory


def make_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return path


def examples(shard: int, labels: Sequence[int]) -> list[tuple[str, bytes]]:
    members = []
    for i, label in enumerate(labels):
        extension, raw = encoded(50 * shard + i)
        key = f"{shard:04}/{i:04}"
        members += [(f"{key}.cls", f"{label}\n".encode()), (f"{key}.json", b"{}"), (f"{key}.{extension}", raw)]
    return members


def make_shards(directory: Path, num_train: int, train: str = "train-{:04}.tar", test: str = "val-{:04}.tar") -> Path:
    for shard in range(num_train):
        make_tar(directory / train.format(shard), examples(shard, [0, shard % 3, 2]))
    make_tar(directory / test.format(0), examples(999, [2, 1, 0, 1]))
    return directory


def table(labels: Sequence[int | None], seed: int = 0, /, **columns: object) -> datasets.Dataset:
    images = [{"bytes": encoded(seed + i)[1], "path": None} for i in range(len(labels))]
    content = {"image": images, "label": list(labels), **columns}
    return datasets.Dataset.from_dict({name: column for name, column in content.items() if column is not None})


def typed(dataset: datasets.Dataset) -> datasets.Dataset:
    return dataset.cast_column("image", datasets.Image()).cast_column(
        "label", datasets.ClassLabel(names=["x", "y", "z"])
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    datasets.disable_progress_bars()


@pytest.fixture(params=["folder", "shards", "table"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Pictures:
    if request.param == "folder":
        return Folder(make_folder(tmp_path, train=(8, 7, 9)) / "train", SIZE)
    if request.param == "shards":
        return Shards(sorted(make_shards(tmp_path, 6).glob("train*.tar")), SIZE)
    parts = {"train": typed(table([0, 1, 2] * 4)), "dev": table([2, 1, 0], 20)}
    for name, part in parts.items():
        part.save_to_disk(tmp_path / name)
    return Table({name: datasets.load_from_disk(tmp_path / name) for name in parts}, SIZE)


class Rows(Dataset[Tensor]):
    """Item i is batch i, as a training view or not."""

    def __init__(self, source: Pictures, seed: int | None):
        self.source, self.seed = source, seed

    def __len__(self) -> int:
        return len(self.source.labels) // 3

    def __getitem__(self, batch: int) -> Tensor:
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed + batch)
        return self.source.read(range(3 * batch, 3 * batch + 3), generator)


class TestViews:
    @given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 33), st.integers(0, 99))
    def test_any_shape_becomes_a_square_of_bytes(self, width: int, height: int, size: int, seed: int) -> None:
        image = noise(width, height, seed)
        for view in (training_view(image, size, torch.Generator().manual_seed(seed)), evaluation_view(image, size)):
            assert view.shape == (3, size, size)
            assert view.dtype == torch.uint8

    @pytest.mark.parametrize("shape", [(1, 1), (1, 500), (500, 1), (2, 3)])
    def test_the_thinnest_images(self, shape: tuple[int, int]) -> None:
        image = noise(*shape, seed=0)
        assert training_view(image, 16, torch.Generator()).shape == evaluation_view(image, 16).shape == (3, 16, 16)

    @given(st.integers(1, 500), st.integers(1, 500), st.integers(0, 999))
    def test_random_boxes_lie_inside_and_are_of_a_permitted_shape(self, width: int, height: int, seed: int) -> None:
        left, top, right, bottom = random_box(width, height, torch.Generator().manual_seed(seed))
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        # sides are rounded to pixels
        assert (w - 1) / (h + 1) <= 4 / 3
        assert (w + 1) / max(h - 1, 0.5) >= 3 / 4
        if min(width, height) > 100 and max(width, height) / min(width, height) < 4 / 3:
            assert (w + 1) * (h + 1) >= 0.08 * width * height

    def test_random_boxes_are_spread_as_they_should(self) -> None:
        generator = torch.Generator().manual_seed(0)
        boxes = torch.tensor([random_box(400, 400, generator) for _ in range(3000)])
        sides = boxes[:, 2:] - boxes[:, :2]
        area = sides.prod(1) / 400**2
        assert float(area.min()) == pytest.approx(0.08, abs=0.01)
        assert 0.45 < float(area.mean()) < 0.55
        assert abs(float((sides[:, 0] / sides[:, 1]).log().mean())) < 0.02
        centres = (boxes[:, 2:] + boxes[:, :2]) / 2
        assert ((centres.mean(0) - 200).abs() < 5).all()

    @pytest.mark.parametrize(("shape", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))])
    def test_where_no_box_fits_the_centre_serves(self, shape: tuple[int, int], box: tuple[int, ...]) -> None:
        assert random_box(*shape, torch.Generator()) == box

    def test_training_views_follow_the_generator_alone(self) -> None:
        image = noise(40, 30, seed=1)
        first, again, other = (training_view(image, SIZE, torch.Generator().manual_seed(s)) for s in (3, 3, 4))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        generators = [torch.Generator().manual_seed(5) for _ in range(2)]
        for generator, shape in zip(generators, [(40, 40), (1, 90)], strict=True):
            training_view(noise(*shape, seed=0), SIZE, generator)
        assert torch.equal(*(training_view(image, SIZE, g) for g in generators))

    def test_half_of_the_training_views_are_mirrored(self) -> None:
        ramp = Image.linear_gradient("L").rotate(90).convert("RGB")
        generator = torch.Generator().manual_seed(0)
        views = [training_view(ramp, SIZE, generator).float() for _ in range(400)]
        mirrored = sum(bool(view[0, 0, 0] > view[0, 0, -1]) for view in views)
        assert 160 < mirrored < 240

    def test_the_evaluation_view_is_resize_and_centre_crop(self) -> None:
        image = Image.linear_gradient("L").resize((448, 320)).convert("RGB")
        shorter = image.resize((358, 256), Image.Resampling.BILINEAR).crop((67, 16, 291, 240))
        slow = torch.frombuffer(bytearray(shorter.tobytes()), dtype=torch.uint8).view(224, 224, 3).permute(2, 0, 1)
        assert (evaluation_view(image, 224).int() - slow.int()).abs().max() <= 2

    @pytest.mark.parametrize(("mode", "kind"), KINDS)
    def test_every_mode_becomes_rgb(self, mode: str, kind: str) -> None:
        file = io.BytesIO()
        noise(6, 5, 0, mode).save(file, kind)
        image = decode(file.getvalue(), "here")
        assert (image.mode, image.size) == ("RGB", (6, 5))
        assert len(set(image.tobytes())) > 1

    def test_sixteen_bits_are_scaled_not_cut_off(self) -> None:
        file = io.BytesIO()
        Image.new("I;16", (2, 2), 256 * 77).save(file, "png")
        assert decode(file.getvalue(), "here").getpixel((0, 0)) == (77, 77, 77)

    def test_transparent_palettes_raise_no_warning(self) -> None:
        file = io.BytesIO()
        noise(6, 5, 0, "P").save(file, "png", transparency=bytes(range(256)))
        assert decode(file.getvalue(), "here").mode == "RGB"

    @pytest.mark.parametrize("broken", [lambda raw: b"", lambda raw: b"no image", lambda raw: raw[: len(raw) // 2]])
    @pytest.mark.parametrize("kind", ["jpeg", "png"])
    def test_broken_images_are_named(self, broken: Callable[[bytes], bytes], kind: str, tmp_path: Path) -> None:
        file = io.BytesIO()
        noise(40, 30, 0).save(file, kind)
        (tmp_path / "x").write_bytes(broken(file.getvalue()))
        for raw in (tmp_path / "x", (tmp_path / "x").read_bytes()):
            with pytest.raises(
                GradsieveError, match=r"^place cannot be read as an image \(.+\)\. Replace it or remove"
            ):
                decode(raw, "place")


class TestEverySource:
    def test_order_does_not_matter(self, source: Pictures) -> None:
        rows = list(range(len(source.labels)))
        pixels = source.read(rows, None)
        assert pixels.shape == (len(rows), 3, SIZE, SIZE)
        assert source.labels.dtype == torch.int64
        assert torch.equal(source.read(rows[::-1], None), pixels.flip(0))
        assert len(pixels.flatten(1).unique(dim=0)) == len(rows)
        assert source.read([], None).shape == (0, 3, SIZE, SIZE)

    def test_random_views_follow_the_generator(self, source: Pictures) -> None:
        first, again, other = (source.read([4, 2], torch.Generator().manual_seed(s)) for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert not torch.equal(first, source.read([4, 2], None))

    def test_it_can_be_pickled(self, source: Pictures) -> None:
        copy = pickle.loads(pickle.dumps(source))
        assert torch.equal(copy.labels, source.labels)
        assert copy.checksum == source.checksum
        assert torch.equal(copy.read([5, 0], None), source.read([5, 0], None))

    @pytest.mark.parametrize("seed", [None, 3])
    def test_workers_read_the_same(self, source: Pictures, seed: int | None) -> None:
        rows = Rows(source, seed)
        here = list(DataLoader(rows, batch_size=None))
        there = list(DataLoader(rows, batch_size=None, num_workers=2))
        assert len(here) == len(there) == len(rows)
        assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))

    def test_labels_beyond_the_classes_are_located(self, source: Pictures) -> None:
        source.check_labels(3)
        with pytest.raises(GradsieveError, match=r"has label 2, but the training set has 2 classes, 0 to 1"):
            source.check_labels(2)


def parts(splits: Splits) -> tuple[ImageSet, ImageSet, ImageSet]:
    return splits.train, splits.dev, splits.test


def sizes(splits: Splits) -> tuple[int, ...]:
    return tuple(len(part) for part in parts(splits))


class TestFolder:
    def test_classes_and_files_go_by_name(self, tmp_path: Path) -> None:
        make_folder(tmp_path, train=(3, 2))
        (tmp_path / "train" / "a" / "._000.jpg").write_bytes(b"rubbish of another system")
        (tmp_path / "train" / "a" / "notes.txt").write_text("no image")
        (tmp_path / "train" / ".hidden").mkdir()
        folder = Folder(tmp_path / "train", SIZE)
        assert folder.classes == ["a", "b"]
        assert folder.labels.tolist() == [0, 0, 0, 1, 1]
        assert [Path(folder.locate(row)[1]).stem for row in range(5)] == ["000", "001", "002", "000", "001"]
        assert folder.shards is None

    def test_the_checksum_knows_names_and_sizes_but_not_the_place(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            make_folder(tmp_path / name, train=(3, 2))
        first, second = (Folder(tmp_path / name / "train", SIZE).checksum for name in ("one", "two"))
        assert first == second
        file = next((tmp_path / "two/train/b").iterdir())
        file.write_bytes(file.read_bytes() + b" ")
        assert Folder(tmp_path / "two/train", SIZE).checksum != first

    @pytest.mark.parametrize("test", ["test", "val"])
    def test_splits(self, test: str, tmp_path: Path) -> None:
        make_folder(tmp_path, **{"train": (40, 25, 2), test: (2, 0, 1)})
        full, tenth = (folder_splits(tmp_path, setting, SIZE) for setting in ("full", "10pct"))
        assert sizes(full) == (36 + 23 + 1, 4 + 2 + 1, 3)
        assert sizes(tenth) == (3 + 1 + 1, 1 + 1 + 1, 3)
        assert tenth.train.rows.tolist() == [0, 1, 2, 40, 65]
        assert tenth.dev.rows.tolist() == [3, 41, 66]
        assert full.dev.rows.tolist() == [36, 37, 38, 39, 63, 64, 66]
        assert full.test.labels.tolist() == [0, 0, 2]
        assert full.num_classes == 3
        assert len(tenth.train + tenth.dev) == 8

    def test_errors(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "few", train=(3, 1), test=(1, 1))
        make_folder(tmp_path / "none", train=(0,), test=(0,))
        make_folder(tmp_path / "lone", train=(3, 3))
        make_folder(tmp_path / "more", train=(3,), test=(1, 1, 1))
        for name, message in {
            "few": "few/train/b needs two images or more, for training and for dev; it has 1",
            "none": "none/train has no images; looked for CLASS/*.{jpg,",
            "lone": "lone must hold the folders train, and test or val",
            "more": "more/test has classes that the training set lacks: b, c",
        }.items():
            with pytest.raises(GradsieveError, match=re.escape(message)):
                folder_splits(tmp_path / name, "full", SIZE)
        with pytest.raises(GradsieveError, match="unknown setting '4k'; choose 10pct or full"):
            folder_splits(make_folder(tmp_path / "good", train=(3,), test=(1,)), "4k", SIZE)

    def test_a_broken_file_is_named(self, tmp_path: Path) -> None:
        folder = Folder(make_folder(tmp_path, train=(3, 2)) / "train", SIZE)
        path = folder.locate(3)[0]
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(GradsieveError, match=re.escape(f"{path} cannot be read as an image")):
            folder.read([0, 3], None)


class TestShards:
    def test_labels_and_shards(self, tmp_path: Path) -> None:
        shards = Shards(sorted(make_shards(tmp_path, 3).glob("train*.tar")), SIZE)
        assert shards.labels.tolist() == [0, 0, 2, 0, 1, 2, 0, 2, 2]
        assert shards.shards is not None
        assert shards.shards.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        raw, name = shards.locate(4)
        assert raw == encoded(51)[1]
        assert name == f"{tmp_path}/train-0001.tar, 0001/0001.{encoded(51)[0]}"

    def test_long_names_and_other_members(self, tmp_path: Path) -> None:
        key = f"{'deep/' * 40}some.example"
        extension, raw = encoded(1)
        members = [(f"./{key}.{extension}", raw), ("README", b""), ("._x.jpg", b""), ("dir/.jpg", b"")]
        path = make_tar(tmp_path / "a.tar", [*members, (f"{'deep/' * 40}x.cls", b"3"), (f"{'deep/' * 40}x.PNG", raw)])
        shards = Shards([path], SIZE)
        assert shards.labels.tolist() == [3]
        assert shards.locate(0)[0] == raw

    def test_the_checksum_knows_labels(self, tmp_path: Path) -> None:
        sums = []
        for place, labels in [("one", [1, 2]), ("two", [1, 2]), ("three", [2, 1])]:
            sums.append(Shards([make_tar(tmp_path / place / "a.tar", examples(0, labels))], SIZE).checksum)
        assert sums[0] == sums[1] != sums[2]

    def test_the_setting_of_the_paper(self, tmp_path: Path) -> None:
        """Of 1,024 shards 102 are used, 10 of these for dev."""
        make_tar(tmp_path / "val.tar", examples(1, [0]))
        first = make_tar(tmp_path / "train-0000.tar", examples(0, [0]))
        for shard in range(1, 1024):
            (tmp_path / f"train-{shard:04}.tar").hardlink_to(first)
        splits = shard_splits(tmp_path, "10pct", SIZE)
        assert sizes(splits) == (92, 10, 1)
        assert isinstance(splits.dev.source, Shards)
        assert [path.name for path in splits.dev.source.paths] == [f"train-{shard:04}.tar" for shard in range(102)]
        assert splits.dev.rows.tolist() == list(range(92, 102))

    @pytest.mark.parametrize(
        ("train", "test"),
        [
            ("train-{:04}.tar", "test-{:04}.tar"),
            ("train{:04}.tar", "validation-{:04}.tar"),
            ("imagenet1k-train-{:04}.tar", "imagenet1k-validation-{:02}.tar"),
            ("train/{:04}.tar", "val/{:04}.tar"),
        ],
    )
    def test_splits(self, train: str, test: str, tmp_path: Path) -> None:
        make_shards(tmp_path, 25, train, test)
        full, tenth = (shard_splits(tmp_path, setting, SIZE) for setting in ("full", "10pct"))
        assert sizes(full) == (23 * 3, 2 * 3, 4)
        assert sizes(tenth) == (3, 3, 4)
        assert full.num_classes == 3
        assert not set(full.train.rows.tolist()) & set(full.dev.rows.tolist())
        assert torch.equal(tenth.train.read(torch.arange(3))[0], full.train.read(torch.arange(3))[0])
        assert full.test.labels.tolist() == [2, 1, 0, 1]

    @pytest.mark.parametrize(
        ("members", "message"),
        [
            ([("x.jpg", b"1"), ("y.cls", b"1"), ("y.png", b"1")], "example x has no label (.cls). Add it or"),
            ([("x.cls", b"1")], "example x has no image (jpg, jpeg, png, bmp, webp, ppm)"),
            ([("x.cls", b"cat"), ("x.jpg", b"")], "a.tar, x.cls holds b'cat'; a label is a whole number from 0 up"),
            ([("x.cls", b"-1"), ("x.jpg", b"")], "a.tar, x.cls holds b'-1'; a label is a whole number from 0 up"),
            ([("x.cls", b"1.5"), ("x.jpg", b"")], "a.tar, x.cls holds b'1.5'"),
            ([("x.cls", b""), ("x.jpg", b"")], "a.tar, x.cls holds b''"),
            ([("x.cls", b"9" * 30), ("x.jpg", b"")], "a.tar, x.cls holds b'9999"),
            ([("x.cls", b"1"), ("x.jpg", b""), ("x.png", b"")], "example x has two images. Remove one"),
            ([("README", b"hello")], "a.tar has no examples. Remove it"),
        ],
    )
    def test_bad_examples(self, members: list[tuple[str, bytes]], message: str, tmp_path: Path) -> None:
        with pytest.raises(GradsieveError, match=re.escape(message)):
            Shards([make_tar(tmp_path / "a.tar", members)], SIZE)

    def test_a_tar_cut_anywhere_is_noticed(self, tmp_path: Path) -> None:
        path = make_tar(tmp_path / "a.tar", examples(0, [1, 2]))
        whole = path.read_bytes()
        with tarfile.open(path) as tar:
            end = max(member.offset_data + member.size for member in tar)
        for length in [0, 100, *range(512, end, 256), end, end // 512 * 512 + 512]:
            path.write_bytes(whole[:length])
            with pytest.raises(GradsieveError, match=r"a\.tar is no whole, uncompressed tar \(.+\)\. Fetch it or make"):
                Shards([path], SIZE)

    def test_compressed_and_damaged_tars_are_refused(self, tmp_path: Path) -> None:
        path = make_tar(tmp_path / "a.tar", examples(0, [1, 2]))
        raw = bytearray(path.read_bytes())
        raw[1024:1030] = b"damage"
        path.write_bytes(raw)
        with tarfile.open(tmp_path / "b.tar", "w:gz") as tar:
            tar.add(path, "x.jpg")
        for name in ("a.tar", "b.tar", "c.tar"):
            with pytest.raises(GradsieveError, match=f"{name} is no whole, uncompressed tar"):
                Shards([tmp_path / name], SIZE)

    def test_errors(self, tmp_path: Path) -> None:
        make_shards(tmp_path / "few", 19)
        make_shards(tmp_path / "one", 1)
        make_tar(tmp_path / "lone/train-0.tar", examples(0, [1]))
        make_shards(tmp_path / "beyond", 2)
        make_tar(tmp_path / "beyond/val-0001.tar", examples(5, [0, 7]))
        with pytest.raises(GradsieveError, match=r"has training shards: 19\. The setting 10pct needs 20 or more"):
            shard_splits(tmp_path / "few", "10pct", SIZE)
        for name, message in {
            "one": "has training shards: 1. The setting full needs 2 or more",
            "lone": "lone must hold the shards train*.tar, and test*.tar or val*.tar",
            "beyond": f"val-0001.tar, 0005/0001.{encoded(251)[0]} has label 7, but the training set has 3 classes",
        }.items():
            with pytest.raises(GradsieveError, match=re.escape(message)):
                shard_splits(tmp_path / name, "full", SIZE)
        with pytest.raises(GradsieveError, match="unknown setting"):
            shard_splits(tmp_path / "few", "half", SIZE)

    def test_a_broken_member_is_named(self, tmp_path: Path) -> None:
        path = make_tar(tmp_path / "a.tar", [("x.jpg", b"rubbish"), ("x.cls", b"0")])
        with pytest.raises(GradsieveError, match=r"a\.tar, x\.jpg cannot be read as an image \(no known format\)"):
            Shards([path], SIZE).read([0], None)


def save_parquet(directory: Path, **splits: datasets.Dataset) -> Path:
    (directory / "data").mkdir(parents=True)
    for name, dataset in splits.items():
        dataset.to_parquet(directory / f"data/{name}-00000-of-00001.parquet")
    return directory


def save_to_disk(directory: Path, **splits: datasets.Dataset) -> Path:
    datasets.DatasetDict(splits).save_to_disk(directory)
    return directory


def test_a_dev_set_of_ones_own_is_used(tmp_path: Path) -> None:
    """Train and dev can be joined all the same, and dev takes nothing away from training."""
    shards, folder = tmp_path / "shards", make_folder(tmp_path / "f", train=(3, 4), dev=(2, 1), test=(1, 1), val=(5, 5))
    make_shards(shards, 3, test="test-{:04}.tar")
    make_tar(shards / "val-0000.tar", examples(77, [1, 1]))
    for splits, sizes in (
        (shard_splits(shards, "full", SIZE), (9, 2, 4)),
        (folder_splits(folder, "full", SIZE), (7, 3, 2)),
    ):
        assert (len(splits.train), len(splits.dev), len(splits.test)) == sizes
        both = splits.train + splits.dev
        order = torch.tensor([len(both) - 1, 0, 1])
        pixels, labels, _ = both.read(order)
        assert torch.equal(pixels[0], splits.dev.read(torch.tensor([sizes[1] - 1]))[0][0])
        assert torch.equal(pixels[1:], splits.train.read(torch.tensor([0, 1]))[0])
        assert labels[0] == splits.dev.labels[-1]


class TestTable:
    @pytest.mark.parametrize("save", [save_parquet, save_to_disk])
    @pytest.mark.parametrize("form", [typed, lambda dataset: dataset])
    def test_splits(
        self, save: Callable[..., Path], form: Callable[[datasets.Dataset], datasets.Dataset], tmp_path: Path
    ) -> None:
        train, dev, test = form(table([0, 1, 2] * 7)), form(table([1, 2], 40)), form(table([2, 1, 0, 1], 50))
        given = table_splits(save(tmp_path / "a", train=train, validation=dev, test=test), SIZE)
        assert sizes(given) == (21, 2, 4)
        assert given.dev.labels.tolist() == [1, 2]
        assert given.num_classes == 3
        assert len(given.train + given.dev) == 23
        tenth = table_splits(save(tmp_path / "b", train=train, validation=test), SIZE)
        assert sizes(tenth) == (19, 2, 4)
        assert tenth.dev.rows.tolist() == [19, 20]
        assert tenth.test.labels.tolist() == [2, 1, 0, 1]
        named = table_splits(save(tmp_path / "c", train=train, validation=test, dev=dev), SIZE)
        assert sizes(named) == (21, 2, 4)
        for splits in (given, named):
            expected = evaluation_view(decode(encoded(41)[1], ""), SIZE)
            assert torch.equal(splits.dev.read(torch.tensor([1]))[0][0], expected)

    @pytest.mark.parametrize("name", ["plain", "odd [x]*"])
    def test_parquet_files_lie_here_or_below_and_may_be_several(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name / "train").mkdir(parents=True)
        for i in range(2):
            table([0, 1], 10 * i).to_parquet(tmp_path / name / f"train/{i:04}.parquet")
        table([1]).to_parquet(tmp_path / name / "test.parquet")
        splits = table_splits(tmp_path / name, SIZE)
        assert sizes(splits) == (3, 1, 1)
        assert splits.train.labels.tolist() == [0, 1, 0]

    def test_the_checksum_is_the_datas_own(self, tmp_path: Path) -> None:
        """Not its place's, nor the process's."""
        places, sums = [], []
        for save in (save_parquet, save_to_disk):
            for name, labels in {"same": [0, 1, 1], "again": [0, 1, 1], "other": [0, 0, 1]}.items():
                places.append(save(tmp_path / save.__name__ / name, train=table(labels), test=table([1])))
                sums.append(table_splits(places[-1], SIZE).checksum)
            same, again, other = sums[-3:]
            assert same == again != other
        code = (
            "import sys, pathlib; from gradsieve.images.tables import table_splits\n"
            "for place in sys.argv[1:]: print(table_splits(pathlib.Path(place), 8).checksum)"
        )
        result = subprocess.run([sys.executable, "-c", code, *places], capture_output=True, text=True, check=True)
        assert result.stdout.split() == sums
        assert result.stderr == ""

    def test_columns_of_other_names(self, tmp_path: Path) -> None:
        binary = datasets.Dataset.from_dict({"img": [encoded(1)[1]] * 3, "fine_label": [0, 1, 1], "id": [5, 6, 7]})
        splits = table_splits(save_to_disk(tmp_path / "binary", train=binary, test=binary), SIZE)
        assert splits.train.read(torch.arange(2))[0].shape == (2, 3, SIZE, SIZE)
        odd = binary.rename_columns({"img": "photo", "fine_label": "kind"})
        place = save_to_disk(tmp_path / "odd", train=odd, test=odd)
        splits = table_splits(place, SIZE, image_column="photo", label_column="kind")
        assert splits.train.labels.tolist() == [0, 1]
        with pytest.raises(
            GradsieveError, match=r"split train has no image column. Name one with image_column; there a"
        ):
            table_splits(place, SIZE)
        with pytest.raises(
            GradsieveError, match=r"has no label column\. Name one with label_column; there are photo, kin"
        ):
            table_splits(place, SIZE, image_column="photo")
        with pytest.raises(GradsieveError, match="has no image column foto"):
            table_splits(place, SIZE, image_column="foto")

    def test_doubtful_columns(self, tmp_path: Path) -> None:
        two = table([0, 1, 1], labels=[0, 0, 0])
        with pytest.raises(
            GradsieveError, match=r"several label columns \(label, labels\). Name one with label_column"
        ):
            table_splits(save_to_disk(tmp_path / "two", train=two, test=two), SIZE)
        assert len(table_splits(tmp_path / "two", SIZE, label_column="labels").train) == 2

    def test_pictures_in_files_beside_the_table(self, tmp_path: Path) -> None:
        (tmp_path / "x.jpg").write_bytes(encoded(0)[1])
        beside = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": str(tmp_path / "x.jpg")}], "label": [0]})
        pixels = Table({"here": beside}, SIZE).read([0], None)
        assert torch.equal(pixels[0], evaluation_view(decode(encoded(0)[1], ""), SIZE))

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ([0, None, 1], "split train, row 1 has label None; a label is a whole number from 0 up"),
            ([0, 1, -1], "split train, row 2 has label -1; a label is a whole number from 0 up"),
            ([0, 0, 0], "split test, row 1 has label 1, but the training set has 1 classes, 0 to 0"),
            ([0], "needs two training rows or more, one of them for dev"),
        ],
    )
    def test_bad_labels(self, labels: list[int | None], message: str, tmp_path: Path) -> None:
        train, test = table(labels), table([0, 0] if len(labels) < 2 else [0, 1])
        with pytest.raises(GradsieveError, match=message):
            table_splits(save_parquet(tmp_path / "x", train=train, test=test), SIZE)

    def test_broken_cells_are_named(self) -> None:
        cells = [{"bytes": b"rubbish", "path": None}, None, {"bytes": None, "path": None}]
        source = Table({"the table": datasets.Dataset.from_dict({"image": cells, "label": [0, 0, 0]})}, SIZE)
        for row in range(3):
            with pytest.raises(GradsieveError, match=f"the table, row {row} cannot be read as an image"):
                source.read([row], None)

    def test_errors(self, tmp_path: Path) -> None:
        table([0, 1]).save_to_disk(tmp_path / "lone")
        save_parquet(tmp_path / "train-only", train=table([0, 1]))
        for name in ("lone", "train-only"):
            with pytest.raises(GradsieveError, match="needs the splits train, and test or validation; it has train"):
                table_splits(tmp_path / name, SIZE)
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken/train.parquet").write_bytes(b"rubbish")
        (tmp_path / "empty").mkdir()
        save_to_disk(tmp_path / "cut", train=table([0, 1]), test=table([0, 1]))
        next((tmp_path / "cut/train").glob("*.arrow")).write_bytes(b"rubbish")
        save_parquet(tmp_path / "rowless", train=table([0]).select([]), test=table([0]))
        for name in ("broken", "empty", "cut", "rowless"):
            with pytest.raises(GradsieveError, match=rf"{name} cannot be read as a table \(.+\)\."):
                table_splits(tmp_path / name, SIZE)
        with pytest.raises(GradsieveError, match="the table has no rows"):
            Table({"the table": table([0]).select([])}, SIZE)

    def test_a_missing_package_is_no_error_of_the_data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_to_disk(tmp_path / "x", train=table([0, 1]), test=table([0]))
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ModuleNotFoundError):
            table_splits(tmp_path / "x", SIZE)

    def test_progress_bars_come_back(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        save_parquet(tmp_path, train=table([0, 1]), test=table([0]))
        datasets.enable_progress_bars()
        table_splits(tmp_path, SIZE)
        assert not datasets.are_progress_bars_disabled()
        assert capfd.readouterr().err == ""


class TestChoice:
    def test_every_form_is_recognised(self, tmp_path: Path) -> None:
        make_folder(tmp_path / "folder", train=(20, 20), test=(1, 1))
        (tmp_path / "folder/ILSVRC2012_img_train.tar").touch()
        make_shards(tmp_path / "shards", 3)
        make_shards(tmp_path / "deep", 3, "train/{:04}.tar", "val/{:04}.tar")
        save_to_disk(tmp_path / "saved", train=table([0, 1]), test=table([0]))
        save_parquet(tmp_path / "parquet", train=table([0, 1]), test=table([0]))
        forms = {"folder": "folder", "shards": "shards", "deep": "shards", "saved": "table", "parquet": "table"}
        assert {name: detect(tmp_path / name) for name in forms} == forms
        for name, form in forms.items():
            found, told = (image_splits(tmp_path / name, how, "full", SIZE) for how in ("auto", form))
            assert found.checksum == told.checksum
        assert sizes(image_splits(tmp_path / "folder", "auto", "10pct", SIZE)) == (2, 2, 2)
        with pytest.raises(GradsieveError, match="saved is a table; its setting must be full, not 10pct"):
            image_splits(tmp_path / "saved", "auto", "10pct", SIZE)
        with pytest.raises(GradsieveError, match="no label column nothing"):
            image_splits(tmp_path / "saved", "auto", "full", SIZE, label_column="nothing")

    def test_nothing_to_recognise(self, tmp_path: Path) -> None:
        (tmp_path / "train").mkdir()
        with pytest.raises(
            GradsieveError, match=r"holds no image set. Looked for train/CLASS/ .* train\*.parquet and data"
        ):
            detect(tmp_path)
        with pytest.raises(GradsieveError, match="unknown format 'zip'; choose auto, shards, folder or table"):
            image_splits(tmp_path, "zip", "full", SIZE)


class TestDownload:
    @pytest.fixture
    def url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        files = {name: name.encode() * 9 for name in ("data_batch_1.bin", "test_batch.bin")}
        extra = {"batches.meta.txt": b"airplane", "readme.html": b"hello"}
        members = [(f"{CIFAR10_FOLDER}/{name}", raw) for name, raw in {**files, **extra}.items()]
        archive = tmp_path / "cifar.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(make_tar(tmp_path / "plain.tar", members), "nested.tar")
            for name, raw in members:
                info = tarfile.TarInfo(name)
                info.size = len(raw)
                tar.addfile(info, io.BytesIO(raw))
        monkeypatch.setattr(download, "CIFAR10_MD5", {n: hashlib.md5(raw).hexdigest() for n, raw in files.items()})
        monkeypatch.setattr(download, "CIFAR10_ARCHIVE_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
        return archive.as_uri()

    def test_it_leaves_the_files_and_nothing_else(self, url: str, tmp_path: Path) -> None:
        out, heard = tmp_path / "new/out", []
        assert download_cifar10(out, url, lambda done, total: heard.append((done, total)))
        assert [path.name for path in out.iterdir()] == [CIFAR10_FOLDER]
        names = {path.name for path in (out / CIFAR10_FOLDER).iterdir()}
        assert names == {"data_batch_1.bin", "test_batch.bin", "batches.meta.txt"}
        size = (tmp_path / "cifar.tar.gz").stat().st_size
        assert heard[-1] == (size, size)

    def test_good_files_are_left_alone_and_bad_ones_replaced(self, url: str, tmp_path: Path) -> None:
        assert download_cifar10(tmp_path / "out", url)
        assert not download_cifar10(tmp_path / "out", "file:///nowhere")
        (tmp_path / "out" / CIFAR10_FOLDER / "test_batch.bin").write_bytes(b"damaged")
        assert download_cifar10(tmp_path / "out", url)
        assert not download_cifar10(tmp_path / "out", "file:///nowhere")

    def test_a_wrong_archive_is_thrown_away(self, url: str, tmp_path: Path) -> None:
        (tmp_path / "cifar.tar.gz").write_bytes(b"an error page")
        with pytest.raises(GradsieveError, match=r"something else than CIFAR-10: its checksum is wrong\. Try again"):
            download_cifar10(tmp_path / "out", url)
        assert list((tmp_path / "out").iterdir()) == []

    @pytest.mark.parametrize("url", ["file:///nowhere/at/all", "http://127.0.0.1:9/"])
    def test_no_network(self, url: str, tmp_path: Path) -> None:
        with pytest.raises(
            GradsieveError, match=rf"could not fetch {url} into .*out \(<urlopen error .*\). Try again, or"
        ):
            download_cifar10(tmp_path / "out", url)
        assert list((tmp_path / "out").iterdir()) == []

    def test_no_place(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(GradsieveError, match=r"could not fetch .* into .*file"):
            download_cifar10(tmp_path / "file", url)

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tarfile.TarFile, "extractall", full)
        with pytest.raises(GradsieveError, match="No space left on device"):
            download_cifar10(tmp_path / "out", url)
        assert list((tmp_path / "out").iterdir()) == []


def test_columns_of_a_file_of_scores_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    splits = folder_splits(make_folder(tmp_path / "data", train=(2, 2), dev=(1, 1), test=(1, 1)), "full", SIZE)
    names, file = ids(splits.train, 0, 4), tmp_path / "s.parquet"
    for content, message in (
        ({"label": [0, 0, 1, 1], "score": [0.5, None, 0.1, None]}, "column score has no value in 2 rows"),
        ({"label": [0, None, 1, 1], "score": [0.5] * 4}, "column label has no value in 1 rows"),
        ({"label": ["a", "a", "b", "b"], "score": [0.5] * 4}, "column label is of type string"),
    ):
        parquet.write_table(pyarrow.table({"id": names, **content}), file)
        with pytest.raises(GradsieveError, match=rf"s\.parquet: {message}"):
            read_scores(file, splits.train)
