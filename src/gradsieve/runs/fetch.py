"""Files from the net, for those who are online."""

from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

CHUNK = 1 << 20
TIMEOUT = 60.0
"""Seconds without an answer."""

OnBytes = Callable[[int, int], None]
"""``on_bytes(done, total)`` hears of the progress; `total` is 0 where the server does not say."""


def fetch(url: str, path: Path, on_bytes: OnBytes) -> None:
    with urlopen(url, timeout=TIMEOUT) as response, path.open("wb") as file:
        total = int(response.headers.get("Content-Length", 0))
        while chunk := response.read(CHUNK):
            file.write(chunk)
            on_bytes(file.tell(), total)
