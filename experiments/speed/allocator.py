"""How long the allocator model takes: ``python -m experiments.speed.allocator``.

The lifetimes of a model's traced steps (two optimizer steps) go through the caching allocator in
its default mode and with expandable segments. Prints events, CPU seconds (best of ``--repeat``)
and, for scale, the CPU seconds that tracing the same steps took in this process.
"""

from __future__ import annotations

import argparse
import time

from llmem.gpu.alloc_conf import AllocConf
from llmem.spec import make_spec
from llmem.timeline import replay
from llmem.trace.run import trace_spec

CONFIGURATIONS = {"default": "", "expandable": "expandable_segments:True"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama-3.1-8b", "llama-3.1-70b"])
    parser.add_argument("-s", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{'model':16} {'ckpt':5} {'mode':10} {'events':>8} {'replay s':>8} {'trace s':>8}")
    for model in arguments.models:
        for checkpointing in (False, True):
            spec = make_spec(
                model=model,
                per_device_train_batch_size=1,
                seq_length=arguments.s,
                gradient_checkpointing=checkpointing,
            )
            trace_spec(spec, steps=1)  # warm: imports
            start = time.process_time()
            lifetimes = trace_spec(spec).lifetimes
            tracing = time.process_time() - start
            for name, text in CONFIGURATIONS.items():
                conf = AllocConf.parse(text)
                best = float("inf")
                for _ in range(arguments.repeat):
                    start = time.process_time()
                    events = len(replay(lifetimes, conf=conf).events.row)
                    best = min(best, time.process_time() - start)
                print(f"{model:16} {checkpointing!s:5} {name:10} {events:8,} {best:8.2f} "
                      f"{tracing:8.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
