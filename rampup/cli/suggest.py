"""`rampup suggest`: batch sizes by scaling laws, or starting sizes for reinforcement learning."""

from __future__ import annotations

import argparse

from rampup.batch_size.scaling_laws import suggest_batch
from rampup.cli.common import Result, arg, usage_error
from rampup.rl.starting_sizes import suggest
from rampup.show.console import print_batch_range, print_suggestion

ARGUMENTS = {
    "--params": arg("N", "parameters of the model without its embeddings, such as 6B; needed with --system"),
    "--train-tokens": arg("D", "tokens of a pre-training run, such as 300B"),
    "--tuned": arg("RATE@BATCH", "with --train-tokens: a tuned learning rate and its batch in tokens, such as 3e-4@0.5M"),
    "--system": arg("NAME", "for reinforcement learning: trlx, skyrl, verl or maxtext_rl"),
    "--memory-gib": arg("GIB", "with --system: memory of one device, for the rule of thumb"),
}


def run(args: argparse.Namespace, console: object) -> Result:
    """Suggest batch sizes for pre-training, or starting sizes for reinforcement learning."""
    if (args.train_tokens is None) == (args.system is None):
        raise usage_error(
            "give --train-tokens for the batch of a pre-training run, or --system for the starting sizes of reinforcement "
            "learning; not both"
        )
    if args.train_tokens is not None:
        if args.memory_gib is not None:
            raise usage_error("--memory-gib needs --system", key="memory-gib")
        found = suggest_batch(args.train_tokens, args.params, tuned=args.tuned)
        return Result(facts=found, show=lambda console: print_batch_range(found, console))
    if args.tuned is not None:
        raise usage_error("--tuned needs --train-tokens", key="tuned")
    if args.params is None:
        raise usage_error("--system needs --params", key="params")
    suggestion = suggest(args.params, system=args.system, memory_gib=args.memory_gib)
    return Result(facts=suggestion.to_dict(), show=lambda console: print_suggestion(suggestion, console))
