"""`rampup generate`: text sampled from a trained model."""

from __future__ import annotations

import argparse

from rampup.cli.common import Result


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rampup generate`."""
    parser.add_argument("run", metavar="RUN_DIR", help="the folder of a run, or one of its checkpoints")
    parser.add_argument("--prompt", metavar="TEXT", default="\n", help="the text to continue, or what to ask a policy")
    parser.add_argument("--tokens", metavar="N", type=int, default=200, help="tokens (bytes) to sample at most, 200 by default")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0.8 by default; 0 takes the most probable token"
    )
    parser.add_argument("--top-k", metavar="K", type=int, help="sample from the K most probable tokens only")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="seed of the random numbers, 0 by default")


def run(args: argparse.Namespace, console: object) -> Result:
    """Load a checkpoint and sample from it."""
    from rampup.rl.load import load

    loaded = load(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    text = loaded.generate(args.prompt, args.tokens, **options)
    facts = {"checkpoint": str(loaded.folder), "step": loaded.step, "prompt": args.prompt, "text": text}
    return Result(facts=facts | options, show=lambda console: print(args.prompt + text))
