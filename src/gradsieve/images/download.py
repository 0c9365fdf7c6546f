"""Fetches CIFAR-10. What lies in the folder afterwards is whole and right, or not there."""

import hashlib
import os
import tarfile
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import GradsieveError
from ..runs.fetch import OnBytes, fetch
from .data import CIFAR10_FOLDER, CIFAR10_MD5

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"


def download_cifar10(out: Path, url: str = CIFAR10_URL, on_bytes: OnBytes = lambda done, total: None) -> bool:
    """Fetches CIFAR-10's binary version into a folder in `out`; False if it was there already, and good.

    `on_bytes(done, total)` hears of the progress; `total` is 0 where the server does not say.
    """
    folder = out / CIFAR10_FOLDER
    if all((folder / name).is_file() and _md5(folder / name) == md5 for name, md5 in CIFAR10_MD5.items()):
        return False
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out, prefix=".cifar10-") as temporary:
            archive = Path(temporary, "archive")
            fetch(url, archive, on_bytes)
            if _md5(archive) != CIFAR10_ARCHIVE_MD5:
                raise GradsieveError(f"{url} gave something else than CIFAR-10: its checksum is wrong. Try again.")
            files = _unpack(archive, Path(temporary))
            folder.mkdir(exist_ok=True)
            for file in files:
                os.replace(file, folder / file.name)
    except (OSError, HTTPException, tarfile.TarError) as error:
        raise GradsieveError(
            f"could not fetch {url} into {out} ({error}). Try again, or fetch and unpack it there by hand."
        ) from error
    return True


def _unpack(archive: Path, to: Path) -> list[Path]:
    wanted = {f"{CIFAR10_FOLDER}/{name}" for name in (*CIFAR10_MD5, "batches.meta.txt")}
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name in wanted]
        tar.extractall(to, members, filter="data")
    return [to / member.name for member in members]


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
