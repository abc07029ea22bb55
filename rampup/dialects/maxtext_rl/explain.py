"""MaxText's rl.yml in words: what each size means, the step's flow, and what its documentation says."""

from __future__ import annotations

import math

from rampup.dialects.maxtext_rl.job import ROLLOUT, TRAIN, RlFile
from rampup.dialects.reading import Settings
from rampup.dialects.rules import counted
from rampup.dialects.verdict import Advice, Meaning

_GUIDE = "MaxText, docs/reference/core_concepts/batch_size.md"


def meanings(file: RlFile, settings: Settings) -> tuple[Meaning, ...]:
    """Return the table of what the file says and what it means; prompts or samples with every size."""
    micro, calls = file.train_micro, file.batch // file.rollout_micro
    total = file.full_batches * settings["rl.num_iterations"]
    generations = file.generations
    return (
        Meaning(
            says=settings.said("batch_size"),
            means=f"{_prompts(file.batch, generations)} per training step and optimizer step",
        ),
        Meaning(says=settings.said("rl.num_generations"), means=f"{counted(generations, 'sample')} (responses) per prompt"),
        Meaning(
            says=settings.said(TRAIN),
            means=f"{_prompts(micro, generations)} per backward pass; {counted(file.batch // micro, 'pass')} "
            "per optimizer step",
        ),
        Meaning(
            says=settings.said(ROLLOUT),
            means=f"{_prompts(file.rollout_micro, generations)} per generate call; {counted(calls, 'call')} per step",
        ),
        Meaning(
            says=settings.said("rl.num_iterations"),
            means=f"{counted(settings['rl.num_iterations'], 'optimizer step')} on the samples of one batch",
        ),
        Meaning(
            says=settings.said("num_batches"),
            means=f"{counted(file.full_batches, 'training step')} over {counted(file.prompts, 'prompt')} "
            f"({counted(settings['num_epoch'], 'epoch')}, train_fraction {settings['train_fraction']:g})",
        ),
        Meaning(says=settings.said("eval_batch_size"), means=f"{counted(file.eval_prompts, 'prompt')} per evaluation"),
        Meaning(
            says="",
            means=f"{counted(total, 'optimizer step')} and {counted(file.full_batches, 'weight sync')} in the whole run",
        ),
    )


def _prompts(number: int, generations: int) -> str:
    return f"{counted(number, 'prompt')} = {counted(number * generations, 'sample')}"


def flow(file: RlFile) -> tuple[str, ...]:
    """Return what one training step does, in order."""
    samples, updates = file.batch * file.generations, file["rl.num_iterations"]
    gathered = math.lcm(file.rollout_micro, file.train_micro)
    return (
        f"load {counted(file.batch, 'prompt')}",
        f"generate in {counted(file.batch // file.rollout_micro, 'call')} of {counted(file.rollout_micro, 'prompt')}: "
        f"{counted(samples, 'sample')} in all",
        f"score and compute log-probabilities as soon as {counted(gathered, 'prompt')} are generated, "
        f"{file.train_micro:,} at a time",
        f"advantages within each prompt's {counted(file.generations, 'sample')}",
        f"{counted(updates, 'time')}: {counted(file.batch // file.train_micro, 'backward pass')} of "
        f"{counted(file.train_micro * file.generations, 'sample')}, then one optimizer step",
        "send the weights to the generator",
    )


def advice(file: RlFile) -> tuple[Advice, ...]:
    """Return what MaxText's documentation says of the sizes, and whether it is true."""
    samples = file.train_micro * file.generations
    return (
        Advice(
            rule="micro batch sizes count pairs of a prompt and a response",
            source=_GUIDE,
            holds=None,
            because=f"they count prompts: {TRAIN} = {counted(file.train_micro, 'prompt')} are "
            f"{counted(samples, 'sequence')} in a backward pass",
        ),
        Advice(
            rule="the batch should be a multiple of the train micro batch",
            source=_GUIDE,
            holds=file.batch % file.train_micro == 0,
            because=f"{file.batch:,} = {file.batch // file.train_micro:,} * {file.train_micro:,}",
        ),
    )
