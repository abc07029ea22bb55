"""A veRL file in words: what its sizes mean, how a training step runs, and which advice is true of it."""

from __future__ import annotations

from collections.abc import Iterator

from rampup.dialects import verl as keys
from rampup.dialects.rules import counted
from rampup.dialects.verdict import Advice, Meaning
from rampup.dialects.verl import BUDGET, LOG_PROB, MICRO, MINI, OLD_SEQUENCE, RESPONSES, ROLLOUT_SIZES, SEQUENCE, TRAIN
from rampup.dialects.verl.job import CRITIC_BUDGET, VerlJob

TUNING, EXPLAINED = "veRL's performance tuning guide", "veRL's explanation of its keys"


def _passes(job: VerlJob) -> str:
    if job.dynamic:
        return "as many passes as the token budget needs"
    return counted(job.actor.share // job.micro, "pass") if job.micro else "passes of unknown size"


def _longest(job: VerlJob) -> int:
    return int(job["data.max_prompt_length"] + job["data.max_response_length"])


def meanings(job: VerlJob) -> Iterator[Meaning]:
    """Yield each setting of the file with its meaning."""
    describe, actor = job.settings.describe, job.actor
    yield Meaning(describe(TRAIN), f"{counted(job.prompts, 'prompt')} per training step")
    yield Meaning(describe(RESPONSES), f"{counted(job.samples, 'sample')} per training step, dispatched together")
    yield Meaning(
        describe(MINI),
        f"prompts, whole job: {counted(actor.mini_samples, 'sample')} per optimizer step, "
        f"{counted(job.mini_batches, 'mini batch')} per pass over the step's samples",
    )
    yield Meaning(describe(keys.EPOCHS), f"{counted(job.optimizer_steps, 'optimizer step')} per training step")
    yield Meaning(
        f"{counted(job.devices, 'device')} / {job.model_sizes['actor']:,} that share a sample ({job.strategies['actor']})",
        f"{counted(actor.replicas, 'replica')}; each has {counted(actor.share, 'sample')} of a mini batch",
    )
    if job.dynamic:
        yield Meaning(describe(BUDGET), f"about {job.token_budget:,} tokens per replica and pass: {_passes(job)}")
    else:
        yield Meaning(describe(MICRO), f"samples per replica (not per device): {_passes(job)} per optimizer step")
        size, share = job[LOG_PROB], job.step_share()
        passes = f"{counted(-(-share // size), 'pass')} over {counted(share, 'sample')}" if size else "not set"
        yield Meaning(describe(LOG_PROB), f"samples per replica in log-probability passes: {passes}")
    if job.padding:
        yield Meaning("", f"{counted(job.padding, 'short artificial sample')} added to each step")
    if job.critic is not None:
        yield Meaning(
            f"{keys.CRITIC_MINI} = {job.critic.mini_batch:,}",
            f"prompts: {counted(job.critic.mini_samples, 'sample')} per critic update, "
            f"{counted(job.num_mini_batches(job.critic) * job.critic.epochs, 'critic update')} per training step",
        )


def flow(job: VerlJob) -> Iterator[str]:
    """Yield the stages of a training step."""
    actor = job.actor
    yield f"load {counted(job.prompts, 'prompt')}; an incomplete last batch of the data set is dropped"
    yield (
        f"generate {counted(job.samples_per_prompt, 'response')} for each: {counted(job.samples, 'sample')} over the engines"
    )
    if job.sync_step > 1:
        yield (
            f"run the following stages {job.sync_step:,} times, with {counted(job.part_samples, 'sample')} each, before the "
            "weights are sent"
        )
    if job.padding:
        yield (
            f"pad to a multiple of {job.required_multiple:,}: {counted(job.padded_part_samples, 'sample')}, of which "
            f"{job.padded_part_samples - job.part_samples:,} are artificial"
        )
    yield (
        f"dispatch: each of {counted(actor.replicas, 'replica')} gets {counted(job.step_share(), 'sample')}, "
        + ("balanced by total length" if job["trainer.balance_batch"] or job.v1 else "in the order of generation")
    )
    models = ["the actor", *(["the reference"] if job.has_ref else [])]
    yield f"log-probabilities of {' and '.join(models)}" + ("; values of the critic" if job.critic else "")
    yield "advantages, on the controller"
    if job.critic is not None:
        yield (
            f"train the critic first: {counted(job.num_mini_batches(job.critic) * job.critic.epochs, 'update')} of "
            f"{counted(job.critic.mini_samples, 'sample')}"
        )
    yield (
        f"train the actor: mini batch j on a replica is its own samples j * {actor.share:,} to (j + 1) * {actor.share:,} - 1, "
        f"in {_passes(job)}, then one optimizer step; {counted(job.mini_batches, 'mini batch')}"
        + (f", {actor.epochs:,} times" if actor.epochs > 1 else "")
        + f" = {counted(job.optimizer_steps, 'optimizer step')}"
    )
    yield "advance the learning rate, once; send the actor's weights to the engines, once"


def advice(job: VerlJob) -> Iterator[Advice]:
    """Yield the rules of the guides, each with what is true of this file."""
    yield Advice(
        "train_batch_size equal to ppo_mini_batch_size with one epoch keeps training on-policy",
        EXPLAINED,
        job.optimizer_steps == 1,
        f"{counted(job.optimizer_steps, 'update')} per rollout",
    )
    yield Advice(
        "a token budget (use_dynamic_bsz) instead of a count of samples is faster if lengths vary",
        TUNING,
        job.dynamic,
        "it is on" if job.dynamic else "it is off",
    )
    if job.dynamic:
        yield Advice(
            "the token budget is at least twice the longest sequence",
            TUNING,
            job[BUDGET] >= 2 * _longest(job),
            f"{job[BUDGET]:,} compared with 2 * {_longest(job):,}",
        )
        yield Advice(
            "a micro batch never exceeds the token budget",
            EXPLAINED,
            None,
            "until August 2026 the budget gave only the number of parts, which are balanced by work and may exceed it",
        )
    elif job.micro and job[LOG_PROB]:
        yield Advice(
            "forward-only micro batches are larger than those of training; start with twice the size",
            TUNING,
            job[LOG_PROB] >= 2 * job.micro,
            f"{job[LOG_PROB]:,} compared with {job.micro:,}",
        )


def notes(job: VerlJob) -> Iterator[str]:
    """Yield what is legal but surprising."""
    yield f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples of one data-parallel replica."
    for model in job.models:
        if job.devices % job.model_sizes[model]:
            yield (
                f"{job.devices:,} devices are not a multiple of the {job.model_sizes[model]:,} that share a sample of the "
                f"{model}: veRL counts {job.replicas[model]:,} replicas, rounded down."
            )
    if job.padding:
        yield (
            f"the newer trainer adds {counted(job.padding, 'short artificial sample')} so that every mini batch is full; the "
            "loss still divides by full mini batches. trainer.use_v1=false fails instead."
        )
    if job.dynamic:
        yield "with a token budget veRL skips most of its checks of sizes and ignores micro batch sizes."
        if job.token_budget < _longest(job):
            yield (
                f"{BUDGET} * devices that share a sequence = {job.token_budget:,} tokens is less than the longest sequence, "
                f"{_longest(job):,}: the first such sequence stops the run."
            )
    if job.critic is not None and not job.legacy:
        yield (
            "the critic's micro sizes and token budget never reach its engine: it fills its passes by tokens, "
            f"{CRITIC_BUDGET:,} of them, regardless of {keys.CRITIC_MICRO} and critic.use_dynamic_bsz."
        )
        if job[OLD_SEQUENCE["critic"]] > 1:
            yield f"{OLD_SEQUENCE['critic']} is read by the check alone; the critic's engine reads {SEQUENCE['critic']}."
        if not job.settings.given & {"critic.enable", "algorithm.adv_estimator"}:
            yield "there is a critic because algorithm.adv_estimator is gae by default."
    yield from _key_notes(job)
    yield from _data_notes(job)
    yield "the learning rate advances once per training step, not per optimizer step."


def _key_notes(job: VerlJob) -> Iterator[str]:
    deprecated = {
        keys.OLD_MICRO: MICRO,
        keys.OLD_LOG_PROB: LOG_PROB,
        keys.OLD_REF_LOG_PROB: keys.REF_LOG_PROB,
        keys.OLD_CRITIC_MICRO: keys.CRITIC_MICRO,
        OLD_SEQUENCE["actor"]: SEQUENCE["actor"],
        "data.val_batch_size": "nothing: validation is dispatched as a whole",
    }
    for old, new in deprecated.items():
        if old in job.settings.given and job[old] is not None:
            yield f"{old} is deprecated; use {new}."
    for name, key in keys.SHELL_NAMES.items():
        if name in job.settings.others:
            yield f"{name} is not a key of veRL but a shell variable of its examples; the key is {key}."
    if not job.settings.given & set(ROLLOUT_SIZES) and job.devices % job.rollout_size:
        yield (
            f"the file does not size the inference engines, and {ROLLOUT_SIZES[0]} is {job[ROLLOUT_SIZES[0]]:,} by default, "
            f"which does not divide {counted(job.devices, 'device')}."
        )


def _data_notes(job: VerlJob) -> Iterator[str]:
    num_prompts = job["num_prompts"]
    if num_prompts is not None and num_prompts % job.prompts:
        lost = counted(num_prompts % job.prompts, "prompt")
        yield f"the last {lost} of {num_prompts:,} are dropped in each pass over the data set."
    if job["data.gen_batch_size"] is not None:
        if job.v1 and job.mode != "sync":
            yield f"trainer_mode={job.mode} sets data.gen_batch_size to 1, regardless of the file."
        elif not job.v1 and job.prompts != job[TRAIN]:
            yield f"with the older trainer a step has data.gen_batch_size={job.prompts:,} prompts, not {TRAIN}={job[TRAIN]:,}."
