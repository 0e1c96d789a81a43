"""Trains models/moe for some seconds, on GPUs and on as many CPU devices, from the same state.

    python losses.py <seconds> <ranks>                # one process; or each process of python -m jaxcomm.run
    python losses.py compare <a.json> <b.json>        # the files that two runs wrote to $JAXCOMM_LOSSES

The second form prints one line of JSON; status 0 if the losses belong together and go down.
"""

import json
import os
import pathlib
import sys
import tempfile
import time

# Platforms round matrix products differently, and rounding errors grow: curves agree closely at first, and in level
# later.
FIRST_STEPS, FIRST_TOLERANCE, LATER_TOLERANCE = 5, 0.02, 0.35


def train(seconds, ranks):
    import jax

    from models.moe import config, train

    platform = jax.config.jax_platforms.split(",")[0]
    sizes = {"layers": 2, "experts": 4, "width": 64, "hidden": 128, "batch": 8, "seq": 64, "eval_batches": 1}
    with tempfile.TemporaryDirectory() as folder:
        out = os.environ.get("JAXCOMM_TRAINING_FOLDER", folder)
        run = train.Run(config.Config(platform=platform, layout=f"1x{ranks}", out=out, sample=0, **sizes))
        losses, times = [run.advance()["loss"]], []  # the first step compiles
        began = time.monotonic()
        # All processes must stop at the same step.
        while not run.any_process(time.monotonic() - began > seconds) and run.step < 400:
            start = time.monotonic()
            losses.append(run.advance()["loss"])
            times.append(time.monotonic() - start)
        result = {"platform": platform, "ranks": ranks, "steps": run.step, "losses": losses}
        result["ms_per_step"] = sorted(times)[len(times) // 2] * 1e3 if times else None
        if run.leads:
            pathlib.Path(os.environ["JAXCOMM_LOSSES"]).write_text(json.dumps(result))


def compare(a, b):
    """A record of both runs, and their differences beyond tolerance."""
    steps = min(a["steps"], b["steps"])
    apart = [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=False)]
    result = {
        "platforms": [side["platform"] for side in (a, b)],
        "ranks": [side["ranks"] for side in (a, b)],
        "steps": [side["steps"] for side in (a, b)],
        "ms_per_step": [side["ms_per_step"] for side in (a, b)],
        "first_loss": [side["losses"][0] for side in (a, b)],
        "loss_at_the_last_common_step": [side["losses"][steps - 1] for side in (a, b)] if steps else [],
        "furthest_apart_in_the_first_steps": max(apart[:FIRST_STEPS], default=None),
        "problem": "",
    }
    if steps < 2 * FIRST_STEPS:
        result["problem"] = f"only {steps} steps on both"
    elif not all(x < FIRST_TOLERANCE for x in apart[:FIRST_STEPS]):  # NaN is not
        result["problem"] = f"losses of the first steps differ by {max(apart[:FIRST_STEPS]):.3f}"
    elif not all(x < LATER_TOLERANCE for x in apart):
        result["problem"] = f"losses differ by up to {max(apart):.3f}"
    elif a["losses"][steps - 1] > a["losses"][0] - 0.2:
        result["problem"] = "the loss does not go down"
    return result


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        result = compare(*(json.loads(pathlib.Path(path).read_text()) for path in sys.argv[2:4]))
        print(json.dumps(result))
        sys.exit(1 if result["problem"] else 0)
    train(float(sys.argv[1]), int(sys.argv[2]))
