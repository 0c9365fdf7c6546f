"""Every test starts from the same random state, whatever ran before it."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("gradsieve", deadline=None, max_examples=12, derandomize=True)
settings.load_profile("gradsieve")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
