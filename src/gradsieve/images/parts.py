"""A large set is scored in parts: each process writes its own, and whoever starts again finds those that are done.

::

    FILE.parts/KEY-00000007.parquet      rows 7 PART to 8 PART: what was measured of each

KEY stands for scorer, model and data, so that parts of anything else are never taken for these.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..runs.checkpoint import OTHER_OUT, written_whole
from ..runs.team import Team
from .data import ImageSet
from .scoring import OnRows, TrainedScorer

PART = 1 << 17
"""Rows of a part."""

Columns = dict[str, Tensor]


def _after(done: int, total: int, on_rows: OnRows) -> OnRows:
    return lambda more, _: on_rows(done + more, total)


class Parts:
    """What was measured of a set of images by a trained scorer, as files beside `out` until `out` is there."""

    def __init__(self, out: Path, trained: TrainedScorer, images: ImageSet):
        self.folder, self.images = out.with_suffix(".parts"), images
        digest = hashlib.sha256(images.source.checksum.encode())
        for tensor in (images.rows, images.labels):
            digest.update(tensor.numpy().tobytes())
        for file in sorted((trained.run / "final").iterdir()):
            digest.update(file.read_bytes())
        self.key = digest.hexdigest()[:16]

    def measure(self, told: Callable[[ImageSet, OnRows], Columns], on_rows: OnRows) -> Columns | None:
        """Each process its share of the parts; the first one then has them all, (N,) each, and the others None."""
        team, done = Team(), 0
        own = list(self._ranges())[team.rank :: team.size]
        total = sum(end - begin for begin, end in own)
        for begin, end in own:
            if not self._file(begin).is_file():
                self._save(self._file(begin), told(self.images[begin:end], _after(done, total, on_rows)))
            done += end - begin
            on_rows(done, total)
        team.wait()
        return self._load() if team.first else None

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, len(self.images), PART):
            yield begin, min(begin + PART, len(self.images))

    def _file(self, begin: int) -> Path:
        return self.folder / f"{self.key}-{begin // PART:08}.parquet"

    def _save(self, file: Path, columns: Columns) -> None:
        import pyarrow
        from pyarrow import parquet

        with written_whole(file, OTHER_OUT) as place:
            parquet.write_table(pyarrow.table({name: column.numpy() for name, column in columns.items()}), place)

    def _load(self) -> Columns:
        from pyarrow import parquet

        tables = [parquet.read_table(self._file(begin)) for begin, _ in self._ranges()]
        return {
            name: torch.cat([torch.from_numpy(table[name].to_numpy().copy()) for table in tables])
            for name in tables[0].column_names
        }
