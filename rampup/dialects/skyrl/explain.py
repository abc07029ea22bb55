"""A SkyRL file in words: what its sizes mean, how a training step runs, and which advice is true of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rampup.dialects.rules import counted
from rampup.dialects.skyrl import CRITIC_MINI, FORWARD, MICRO, MINI, RESPONSES, TRAIN
from rampup.dialects.verdict import Advice, Meaning

if TYPE_CHECKING:
    from rampup.dialects.skyrl.rules import SkyRLJob

GUIDE, DOCUMENTATION = "a community guide to SkyRL", "SkyRL's documentation of its keys"


def meanings(job: SkyRLJob) -> Iterator[Meaning]:
    """Yield each setting of the file with its meaning."""
    describe, policy = job.settings.describe, job.policy
    yield Meaning(describe(TRAIN), f"{counted(job.prompts, 'prompt')} per training step")
    yield Meaning(
        describe(RESPONSES), f"{counted(job.samples, 'sample')} per training step, generated in one call of the engines"
    )
    yield Meaning(
        describe(MINI),
        f"prompts, whole job: {counted(policy.mini_samples, 'sample')} per optimizer step, "
        f"{counted(job.mini_batches, 'mini batch')} per pass over the step's samples",
    )
    yield Meaning(
        describe("trainer.update_epochs_per_batch"),
        f"{counted(job.mini_batches * job.epochs, 'optimizer step')} per training step",
    )
    if job.critic is not None:
        yield Meaning(
            describe(CRITIC_MINI),
            f"prompts: {counted(job.critic.mini_samples, 'sample')} per critic update, "
            f"{counted(job.prompts // job.critic.mini_batch * job.epochs, 'critic update')} per training step",
        )
    yield Meaning(
        f"{counted(job.devices['policy'], 'policy device')} / {job.model_sizes['policy']:,} that share a sample",
        f"{counted(policy.replicas, 'replica')}; each has {counted(policy.padded_share, 'sample')} of a mini batch"
        + (f" ({policy.padding:,} of the mini batch are empty)" if policy.padding else ""),
    )
    passes = "as many passes as the token budget needs" if job.by_tokens else counted(job.passes(policy), "pass")
    yield Meaning(describe(MICRO), f"samples per replica: {passes} per optimizer step")
    yield Meaning(describe(FORWARD), "samples per replica in forward-only passes (log-probabilities, values)")
    evaluated = job["trainer.eval_batch_size"] * job["generator.eval_n_samples_per_prompt"]
    yield Meaning(
        describe("trainer.eval_batch_size"),
        f"{counted(evaluated, 'sample')} per evaluation batch; the last batch may be smaller",
    )


def flow(job: SkyRLJob) -> Iterator[str]:
    """Yield the stages of a training step."""
    policy, responses = job.policy, counted(job.samples_per_prompt, "response")
    times = "once" if job.epochs == 1 else f"{job.epochs:,} times"
    yield f"load {counted(job.prompts, 'prompt')}; an incomplete last batch of the data set is dropped"
    yield f"generate {responses} for each: {counted(job.samples, 'sample')}, the responses of a prompt next to each other"
    yield (
        f"forward passes of {', '.join(f'the {model}' for model in job.models).replace('the ref', 'the reference')}: about "
        f"{counted(-(-job.samples // policy.replicas), 'sample')} per replica, {job[FORWARD]:,} at a time"
    )
    yield f"advantages over each prompt's {responses}"
    if job.critic is not None:
        yield (
            f"train the critic first: {counted(job.prompts // job.critic.mini_batch, 'mini batch')} of "
            f"{counted(job.critic.mini_samples, 'sample')}, {times}"
        )
    yield (
        f"mini batch j is samples j * {policy.mini_samples:,} to (j + 1) * {policy.mini_samples:,} - 1"
        + (f", padded with {counted(policy.padding, 'empty sample')}" if policy.padding else "")
        + f"; replica r takes {policy.padded_share:,} of them in order, from r * {policy.padded_share:,} on"
    )
    passes = "token-budget passes" if job.by_tokens else counted(job.passes(policy), "pass")
    yield (
        f"train the policy: {counted(job.mini_batches, 'mini batch')}, each {passes} on every replica and one optimizer step, "
        f"{times} = {counted(job.mini_batches * job.epochs, 'optimizer step')}"
    )
    yield "send the policy's weights to the engines, once"


def advice(job: SkyRLJob) -> Iterator[Advice]:
    """Yield the rules of the guides, each with what is true of this file."""
    policy, mini, updates = job.policy, job.policy.mini_batch, job.mini_batches
    yield Advice(
        "optimizer steps = train_batch_size * n_samples_per_prompt / policy_mini_batch_size",
        GUIDE,
        None,
        f"policy_mini_batch_size counts prompts, not samples: {updates:,} and not {job.samples // mini:,}",
    )
    yield Advice(
        "policy_mini_batch_size is a multiple of micro_train_batch_size_per_gpu * devices; that gives the passes",
        GUIDE,
        None,
        f"the samples of a mini batch are divided, not its prompts: {job.passes(policy):,} passes and not "
        f"{mini / (job[MICRO] * policy.replicas):,.6g}",
    )
    yield Advice(
        "for an out-of-memory error, lower policy_mini_batch_size",
        GUIDE,
        None,
        f"it changes the number of passes, not their size; lower {MICRO}, now {job[MICRO]:,}",
    )
    yield Advice(
        "policy_mini_batch_size equal to train_batch_size keeps training on-policy",
        GUIDE,
        updates * job.epochs == 1,
        f"{counted(updates * job.epochs, 'update')} per rollout",
    )
    if job.critic is not None:
        yield Advice(
            "critic_mini_batch_size is smaller than policy_mini_batch_size, so that the critic is updated more often",
            DOCUMENTATION,
            job.critic.mini_batch < mini,
            f"{job.critic.mini_batch:,} compared with {mini:,} prompts",
        )


def notes(job: SkyRLJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    yield f"{TRAIN}, {MINI} and the critic's count prompts; micro sizes count samples of one data-parallel replica."
    for model in job.models:
        if job.devices[model] % job.model_sizes[model]:
            yield (
                f"the {model}'s {job.devices[model]:,} devices are not a multiple of the {job.model_sizes[model]:,} that share "
                f"a sample: SkyRL counts {job.replicas[model]:,} replicas, rounded down, without a warning."
            )
    for trained in job.trained:
        if trained.padding:
            yield (
                f"{trained.name}: {trained.mini_samples:,} samples of a mini batch over {trained.replicas:,} replicas: the run "
                f"adds {counted(trained.padding, 'empty sample')} to each."
            )
        if (rest := trained.padded_share % job[MICRO]) and not job.by_tokens:
            text = f"{trained.name}: the last pass of each mini batch has {rest:,} samples instead of {job[MICRO]:,}"
            if job["trainer.algorithm.loss_reduction"] == "token_mean_legacy":
                yield f"{text}, which trainer.algorithm.loss_reduction=token_mean_legacy weights wrongly."
            else:
                yield f"{text}; the loss is weighted accordingly."
    if job.by_tokens:
        yield (
            f"trainer.max_tokens_per_microbatch={job['trainer.max_tokens_per_microbatch']:,} fills the passes by tokens; a "
            f"longer sequence still gets a pass of its own. {MICRO} is then ignored, but its rules are still enforced."
        )
    num_prompts = job["num_prompts"]
    if num_prompts is not None and num_prompts % job.prompts:
        lost = counted(num_prompts % job.prompts, "prompt")
        yield f"the last {lost} of {num_prompts:,} are dropped in each pass over the data set."
    if job["trainer.placement.colocate_all"] and job.engine_devices is None:
        yield (
            "trainer.placement.colocate_all is on and the file does not size the inference engines: engines * tensor * "
            f"pipeline * data parallel size must be {job.devices['policy']:,}, and so must every other model's devices."
        )
    if job["trainer.strategy"] == "fsdp2":
        yield "trainer.strategy=fsdp2 is an old name of fsdp."
    if job["trainer.use_sample_packing"] is not None:
        yield "trainer.use_sample_packing is now called trainer.remove_microbatch_padding."
    yield "the learning-rate schedule advances with every optimizer step."
