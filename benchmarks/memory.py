"""What it costs that malloc gives a step's memory back: time and page faults of a step, and the most memory resident.

    python benchmarks/memory.py wrn-16-1 uniform            # as a program of your own runs
    python benchmarks/memory.py wrn-16-1 uniform --keep     # as the command line does

Models and methods are those of `gradsieve bench`.
"""

import argparse
import resource
from statistics import median
from time import perf_counter

import torch

from gradsieve.bench.contenders import CONTENDERS
from gradsieve.bench.subjects import subject_of
from gradsieve.runs.memory import keep_freed_memory

STEPS = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("method", choices=CONTENDERS)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    subject = subject_of(args.model)
    if subject is None:
        parser.error(f"unknown model {args.model!r}")
    if args.keep:
        keep_freed_memory()
    step, seconds = CONTENDERS[args.method](subject, torch.device("cpu")), []
    for _ in range(3):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(STEPS):
        start = perf_counter()
        step()
        seconds.append(perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    faults, system = (after.ru_minflt - before.ru_minflt) / STEPS, (after.ru_stime - before.ru_stime) / STEPS
    print(
        f"{args.model}, {args.method}: {1000 * median(seconds):.0f} ms a step, {faults:,.0f} page faults, "
        f"{1000 * system:.0f} ms in the system, {after.ru_maxrss / 1e6:.2f} GB resident at most"
    )


if __name__ == "__main__":
    main()
