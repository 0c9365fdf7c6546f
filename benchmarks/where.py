"""Where a run's time goes, from a profile by py-spy.

    pip install py-spy
    py-spy record --format raw --rate 200 --output profile.txt -- gradsieve train digits --method dds --out runs/profile
    python benchmarks/where.py profile.txt

A sample counts for the innermost part of ours that it lies in, or else of torch's; what lies in none, start-up above
all, is the rest.
"""

import argparse
from collections import Counter
from pathlib import Path

OURS = {
    "training forward": ("training_forward (", "loss (gradsieve/baselines", "loss (gradsieve/translation"),
    "alignment": ("told (gradsieve/agreement",),
    "scorer": ("score (gradsieve/learner", "learn (gradsieve/learner"),
    "replay": ("hear_again (gradsieve",),
    "dev gradient": ("dev_gradient (gradsieve",),
    "rewards": ("rewards (gradsieve/agreement",),
    "store of gradients": ("observe (gradsieve/", "gradsieve/gradients"),
    "scorer's start from a prior": ("imitate (gradsieve",),
    "rest of loss() and step()": ("loss (gradsieve/reweight", "step (gradsieve/reweight", "step (gradsieve/resample"),
    "data": ("gradsieve/images/stream", "gradsieve/translation/stream"),
    "evaluation": ("evaluate (gradsieve", "look (gradsieve", "gradsieve/translation/decode"),
    "journal and checkpoints": ("gradsieve/runs/journal", "gradsieve/runs/checkpoint"),
    "reading and encoding text": ("gradsieve/translation/load", "gradsieve/translation/pairs"),
}
TORCHS = {
    "backward": ("backward (torch/", "grad (torch/autograd/__init__"),
    "optimizer": ("step (torch/optim", "wrapper (torch/optim", "clip_grad_norm_ (torch"),
    "moving average": ("update_parameters (torch",),
}


def part_of(stack: str) -> str:
    """The innermost part of a stack, whose frames are given from the outermost on."""
    for parts in (OURS, TORCHS):
        for frame in reversed(stack.split(";")):
            for part, marks in parts.items():
                if any(mark in frame for mark in marks):
                    return part
    return "the rest"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    counts = Counter[str]()
    for line in parser.parse_args().profile.read_text().splitlines():
        stack, _, samples = line.rpartition(" ")
        counts[part_of(stack)] += int(samples)
    for part, samples in counts.most_common():
        print(f"{samples / counts.total():6.1%}  {part}")


if __name__ == "__main__":
    main()
