"""`rampup generate`: text sampled from a trained model."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result, arg

ARGUMENTS = {
    "run": arg("RUN_DIR", "the folder of a run, or one of its checkpoints"),
    "--prompt": arg("TEXT", "the text to continue, or what to ask a policy", default="\n"),
    "--tokens": arg("N", "tokens (bytes) to sample at most, 200 by default", type=int, default=200),
    "--temperature": arg("T", "0.8 by default; 0 takes the most probable token", type=float, default=0.8),
    "--top-k": arg("K", "sample from the K most probable tokens only", type=int),
    "--seed": arg("S", "seed of the random numbers, 0 by default", type=int, default=0),
}


def run(args: argparse.Namespace, console: object) -> Result:
    """Load a checkpoint and sample from it."""
    from rampup.rl.train import load

    loaded = load(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    text = loaded.generate(args.prompt, args.tokens, **options)
    facts = {"checkpoint": str(loaded.folder), "step": loaded.step, "prompt": args.prompt, "text": text}
    return Result(facts=facts | options, show=lambda console: print(args.prompt + text))
