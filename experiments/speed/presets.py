"""How long every preset takes: ``python -m experiments.speed.presets [--models NAME ...]``.

Each preset is estimated by the command line in a process of its own, imports included, with
checkpointing off and on (batch 1, 512 tokens). Prints the user and system seconds of the process
and its peak resident memory, then how many presets stay under 6 and under 15 seconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from llmem.models import list_presets

LIMITS = (6.0, 15.0)
"""Seconds of CPU that most, and that all, are meant to stay under."""


def run(model: str, *, checkpointing: bool) -> tuple[float, float]:
    """CPU seconds and peak resident MiB of one ``llmem estimate``."""
    command = [sys.executable, "-m", "llmem", "estimate", model, "-b", "1", "-s", "512"]
    command += ["--gradient-checkpointing"] * checkpointing
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[p.name for p in list_presets()])
    names = parser.parse_args().models
    print(f"{'model':28} {'plain s':>8} {'ckpt s':>8} {'RSS MiB':>8}")
    seconds = []
    for name in names:
        plain, resident = run(name, checkpointing=False)
        recomputed, more = run(name, checkpointing=True)
        seconds.append(max(plain, recomputed))
        print(f"{name:28} {plain:8.2f} {recomputed:8.2f} {max(resident, more):8,.0f}", flush=True)
    for limit in LIMITS:
        print(f"{sum(s < limit for s in seconds)} of {len(seconds)} under {limit:g} s of CPU")


if __name__ == "__main__":
    main()
