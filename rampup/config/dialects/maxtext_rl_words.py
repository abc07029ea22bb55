"""MaxText's rl.yml in words: what each size means, the step's flow, effects, and what its documentation says."""

from __future__ import annotations

import math

from rampup.config.dialects.maxtext_rl_facts import ROLLOUT, TRAIN, RlFile
from rampup.config.dialects.settings import Settings
from rampup.config.dialects.verdict import Advice, Effect, Meaning

_GUIDE = "MaxText, docs/reference/core_concepts/batch_size.md"


def meanings(file: RlFile, settings: Settings) -> tuple[Meaning, ...]:
    """Return the table of what the file says and what it means; prompts or samples with every size."""
    micro, calls = file.train_micro, file.batch // file.rollout_micro
    total = file.full_batches * settings["rl.num_iterations"]
    return (
        Meaning(
            says=settings.said("batch_size"),
            means=f"{file.batch:,} prompts = {file.batch * file.generations:,} samples per training step and optimizer step",
        ),
        Meaning(says=settings.said("rl.num_generations"), means=f"{file.generations:,} samples (responses) per prompt"),
        Meaning(
            says=settings.said(TRAIN),
            means=f"{micro:,} prompts = {micro * file.generations:,} samples per backward pass; {file.batch // micro:,} passes "
            "per optimizer step",
        ),
        Meaning(
            says=settings.said(ROLLOUT),
            means=f"{file.rollout_micro:,} prompts = {file.rollout_micro * file.generations:,} samples per generate call; "
            f"{calls:,} calls per step",
        ),
        Meaning(
            says=settings.said("rl.num_iterations"),
            means=f"{settings['rl.num_iterations']:,} optimizer steps on the samples of one batch",
        ),
        Meaning(
            says=settings.said("num_batches"),
            means=f"{file.full_batches:,} training steps over {file.prompts:,} prompts ({settings['num_epoch']:,} epochs, "
            f"train_fraction {settings['train_fraction']:g})",
        ),
        Meaning(says=settings.said("eval_batch_size"), means=f"{file.eval_prompts:,} prompts per evaluation"),
        Meaning(says="", means=f"{total:,} optimizer steps and {file.full_batches:,} weight syncs in the whole run"),
    )


def flow(file: RlFile) -> tuple[str, ...]:
    """Return what one training step does, in order."""
    samples, updates = file.batch * file.generations, file["rl.num_iterations"]
    gathered = math.lcm(file.rollout_micro, file.train_micro)
    return (
        f"load {file.batch:,} prompts",
        f"generate in {file.batch // file.rollout_micro:,} calls of {file.rollout_micro:,} prompts: {samples:,} samples in all",
        f"score and compute log-probabilities as soon as {gathered:,} prompts are generated, {file.train_micro:,} at a time",
        f"advantages within each prompt's {file.generations:,} samples",
        f"{updates:,} times: {file.batch // file.train_micro:,} backward passes of {file.train_micro * file.generations:,} "
        "samples, then one optimizer step",
        "send the weights to the generator",
    )


def effects(file: RlFile) -> tuple[Effect, ...]:
    """Return what changing each size does."""
    updates = file["rl.num_iterations"]
    return (
        Effect(
            key="batch_size",
            memory="stored samples grow with it; passes do not, while the train micro batch is given",
            speed="more to generate at once, fewer weight syncs per prompt",
            policy_lag="none: one batch is one optimizer step",
        ),
        Effect(key=TRAIN, memory="activations of a backward pass grow with it", speed="larger passes, fewer of them"),
        Effect(key=ROLLOUT, memory="the generator's cache grows with it", speed="larger generate calls"),
        Effect(key="rl.num_generations", memory="all sizes in samples grow with it", speed="more to generate per prompt"),
        Effect(
            key="rl.num_iterations",
            speed="more optimizer steps for the same samples",
            policy_lag=f"{updates:,} updates per rollout: "
            + ("on-policy" if updates == 1 else f"the last one trains on samples {updates - 1:,} updates old"),
        ),
    )


def advice(file: RlFile) -> tuple[Advice, ...]:
    """Return what MaxText's documentation says of the sizes, and whether it is true."""
    samples = file.train_micro * file.generations
    return (
        Advice(
            rule="micro batch sizes count pairs of a prompt and a response",
            source=_GUIDE,
            holds=None,
            because=f"they count prompts: {TRAIN} = {file.train_micro:,} prompts are {samples:,} sequences in a backward pass",
        ),
        Advice(
            rule="the batch should be a multiple of the train micro batch",
            source=_GUIDE,
            holds=file.batch % file.train_micro == 0,
            because=f"{file.batch:,} = {file.batch // file.train_micro:,} * {file.train_micro:,}",
        ),
    )
