"""A veRL file in words: what its sizes mean, how a step flows, what each size costs, and which advice is true of it."""

from __future__ import annotations

from rampup.dialects.rules import counted
from rampup.dialects.verdict import Advice, Meaning
from rampup.dialects.verl.job import (
    ACTOR,
    REF,
    RESPONSES,
    ROLLOUT,
    ROLLOUT_SIZES,
    SHELL_NAMES,
    TRAIN,
    VerlJob,
)

MINI, MICRO, BUDGET = (
    f"{ACTOR}.ppo_{name}" for name in ("mini_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
)
LOG_PROB = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
TUNING, EXPLAINED = "veRL's performance tuning guide", "veRL's explanation of its keys"
CRITIC_BUDGET = 32_768


def _passes(job: VerlJob) -> str:
    actor = job.role("actor")
    if job.dynamic:
        return "as many passes as the token budget needs"
    return counted(actor.per_replica // job.micro, "pass") if job.micro else "passes of unknown size"


def meanings(job: VerlJob) -> tuple[Meaning, ...]:
    """Return what the file says and what it means."""
    said, actor, updates = job.settings.said, job.role("actor"), job.mini_batches("actor")
    strategy = job.strategy("actor")
    lines = [
        Meaning(says=said(TRAIN), means=f"{counted(job.prompts, 'prompt')} per training step"),
        Meaning(says=said(RESPONSES), means=f"{counted(job.samples, 'sample')} per training step, sent off together"),
        Meaning(
            says=said(MINI),
            means=f"prompts, whole job: {counted(actor.mini_samples, 'sample')} per optimizer step, "
            f"{counted(updates, 'mini batch')} per pass over the step's samples",
        ),
        Meaning(
            says=said(f"{ACTOR}.ppo_epochs"), means=f"{counted(updates * actor.epochs, 'optimizer step')} per training step"
        ),
        Meaning(
            says=f"{counted(job.devices, 'device')} / {job.model_size('actor'):,} that share a sample ({strategy})",
            means=f"{counted(actor.data_parallel_size, 'replica')}; {counted(actor.per_replica, 'sample')} of each mini batch "
            "on each",
        ),
    ]
    if job.dynamic:
        lines.append(
            Meaning(says=said(BUDGET), means=f"about {token_budget(job):,} tokens per replica and pass: {_passes(job)}")
        )
    else:
        share = job.filled_part_samples // actor.data_parallel_size
        lines.append(
            Meaning(says=said(MICRO), means=f"samples per replica (not per device): {_passes(job)} per optimizer step")
        )
        size = job[LOG_PROB]
        passes = f"{counted(-(-share // size), 'pass')} over {counted(share, 'sample')}" if size else "not set"
        lines.append(Meaning(says=said(LOG_PROB), means=f"samples per replica in log-probability passes: {passes}"))
    if job.padding:
        lines.append(Meaning(says="", means=f"{counted(job.padding, 'short artificial sample')} added to each step"))
    if job.has_critic:
        critic = job.role("critic")
        lines.append(
            Meaning(
                says=f"critic.ppo_mini_batch_size = {critic.mini:,}",
                means=f"prompts: {counted(critic.mini_samples, 'sample')} per critic update, "
                f"{counted(job.mini_batches('critic') * critic.epochs, 'critic update')} per training step",
            )
        )
    return tuple(lines)


def token_budget(job: VerlJob) -> int:
    """Return the tokens of a pass and replica: the budget of all devices that share a sequence."""
    megatron = job.strategy("actor") == "megatron"
    return int(job[BUDGET] * (job[f"{ACTOR}.megatron.context_parallel_size"] if megatron else job.model_size("actor")))


def flow(job: VerlJob) -> tuple[str, ...]:
    """Return a training step, stage by stage."""
    actor, updates = job.role("actor"), job.mini_batches("actor")
    share = job.filled_part_samples // actor.data_parallel_size
    lines = [
        f"load {counted(job.prompts, 'prompt')}; an incomplete last batch of the data set is dropped",
        f"generate {counted(job.samples_per_prompt, 'response')} for each: {counted(job.samples, 'sample')} over the engines",
    ]
    if job.sync_step > 1:
        lines.append(
            f"do what follows {job.sync_step:,} times, with {counted(job.part_samples, 'sample')} each, before weights go out"
        )
    if job.padding:
        lines.append(
            f"fill up to a multiple of {job.required_multiple:,}: {counted(job.filled_part_samples, 'sample')}, of which "
            f"{job.filled_part_samples - job.part_samples:,} artificial"
        )
    lines.append(
        f"share out: each of {counted(actor.data_parallel_size, 'replica')} gets {counted(share, 'sample')}, "
        + ("so that their total lengths are alike" if job["trainer.balance_batch"] or job.v1 else "in the order generated")
    )
    models = ["the actor", *(["the reference"] if job.has_ref else [])]
    lines.append(f"log-probabilities of {' and '.join(models)}" + ("; values of the critic" if job.has_critic else ""))
    lines.append("advantages, on the controller")
    if job.has_critic:
        critic = job.role("critic")
        lines.append(
            f"train the critic first: {counted(job.mini_batches('critic') * critic.epochs, 'update')} of "
            f"{counted(critic.mini_samples, 'sample')}"
        )
    lines += [
        f"train the actor: mini batch j on a replica is its own samples j * {actor.per_replica:,} to (j + 1) * "
        f"{actor.per_replica:,} - 1, in {_passes(job)}, then one optimizer step; {counted(updates, 'mini batch')}"
        + (f", {actor.epochs:,} times over" if actor.epochs > 1 else "")
        + f" = {counted(updates * actor.epochs, 'optimizer step')}",
        "advance the learning rate, once; send the actor's weights to the engines, once",
    ]
    return tuple(lines)


def advice(job: VerlJob) -> tuple[Advice, ...]:
    """Return the guides' rules, each with what is true of this file."""
    actor, updates = job.role("actor"), job.mini_batches("actor") * job.role("actor").epochs
    rules = [
        Advice(
            rule="micro batch sizes per gpu count samples of a data-parallel replica, not of a device",
            source=EXPLAINED,
            holds=True,
            because=f"{counted(job.model_size('actor'), 'device')} to a sample; {counted(actor.data_parallel_size, 'replica')}",
        ),
        Advice(
            rule="mini batch sizes count prompts of the whole job",
            source=EXPLAINED,
            holds=True,
            because=f"{actor.mini:,} prompts are {counted(actor.mini_samples, 'sample')}",
        ),
        Advice(
            rule="train_batch_size equal to ppo_mini_batch_size with one epoch keeps training on-policy",
            source=EXPLAINED,
            holds=updates == 1,
            because=f"{counted(updates, 'update')} per rollout",
        ),
        Advice(
            rule="a token budget (use_dynamic_bsz) instead of a count of samples is faster where lengths vary",
            source=TUNING,
            holds=job.dynamic,
            because="it is on" if job.dynamic else "it is off",
        ),
    ]
    return (*rules, *_pass_advice(job))


def _pass_advice(job: VerlJob) -> list[Advice]:
    """What is advised for the sizes of a pass: by tokens, or by samples."""
    if job.dynamic:
        longest = job["data.max_prompt_length"] + job["data.max_response_length"]
        return [
            Advice(
                rule="the token budget is at least twice the longest sequence",
                source=TUNING,
                holds=job[BUDGET] >= 2 * longest,
                because=f"{job[BUDGET]:,} against 2 * {longest:,}",
            ),
            Advice(
                rule="a micro batch never exceeds the token budget",
                source=EXPLAINED,
                holds=None,
                because="until August 2026 the budget gave only the number of parts, which are balanced by work and may "
                "exceed it",
            ),
        ]
    if job.micro and job[LOG_PROB]:
        return [
            Advice(
                rule="forward-only micro batches are larger than those of training, twice as large for a start",
                source=TUNING,
                holds=job[LOG_PROB] >= 2 * job.micro,
                because=f"{job[LOG_PROB]:,} against {job.micro:,}",
            )
        ]
    return []


def notes(job: VerlJob) -> tuple[str, ...]:
    """Return what is legal but surprising."""
    found = [f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples of one data-parallel replica."]
    found += [
        f"{job.devices:,} devices are no multiple of the {job.model_size(model):,} that share a sample of the {model}: "
        f"veRL counts {job.data_parallel_size(model):,} replicas, rounded down."
        for model in job.models
        if job.devices % job.model_size(model)
    ]
    if job.padding:
        found.append(
            f"the newer trainer adds {counted(job.padding, 'short artificial sample')} so that every mini batch is full; the "
            "loss still divides by whole mini batches. trainer.use_v1=false fails instead."
        )
    if job.dynamic:
        found += _dynamic_notes(job)
    if job.has_critic:
        found += _critic_notes(job)
    return (*found, *_names(job), *_data(job), "the learning rate advances once per training step, not per optimizer step.")


def _dynamic_notes(job: VerlJob) -> list[str]:
    longest = job["data.max_prompt_length"] + job["data.max_response_length"]
    found = ["with a token budget veRL skips most of its checks of sizes, and micro batch sizes are ignored."]
    if token_budget(job) < longest:
        found.append(
            f"{BUDGET} * devices that share a sequence = {token_budget(job):,} tokens is less than the longest sequence, "
            f"{longest:,}: the first such sequence stops the run."
        )
    return found


def _critic_notes(job: VerlJob) -> list[str]:
    if job.legacy:
        return []
    found = [
        "the critic's micro sizes and token budget never reach its engine: it fills its passes by tokens, "
        f"{CRITIC_BUDGET:,} of them, whatever critic.ppo_micro_batch_size_per_gpu or critic.use_dynamic_bsz say."
    ]
    if job["critic.ulysses_sequence_parallel_size"] > 1:
        found.append(
            "critic.ulysses_sequence_parallel_size is read by the check alone; the critic's engine looks at "
            "critic.fsdp.ulysses_sequence_parallel_size."
        )
    if "critic.enable" not in job.settings.given and "algorithm.adv_estimator" not in job.settings.given:
        found.append("there is a critic because algorithm.adv_estimator is gae by default.")
    return found


def _names(job: VerlJob) -> list[str]:
    deprecated = {
        f"{ACTOR}.ppo_micro_batch_size": MICRO,
        f"{ROLLOUT}.log_prob_micro_batch_size": LOG_PROB,
        f"{REF}.log_prob_micro_batch_size": f"{REF}.log_prob_micro_batch_size_per_gpu",
        "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
        f"{ACTOR}.ulysses_sequence_parallel_size": f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        "data.val_batch_size": "nothing: validation goes out whole",
    }
    found = [
        f"{old} is deprecated; use {new}."
        for old, new in deprecated.items()
        if old in job.settings.given and job[old] is not None
    ]
    found += [
        f"{name} is no key of veRL but a shell variable of its examples; the key is {key}."
        for name, key in SHELL_NAMES.items()
        if name in job.settings.others
    ]
    if not job.settings.given & set(ROLLOUT_SIZES) and job.devices % job.rollout_size:
        found.append(
            f"the file does not size the inference engines, and {ROLLOUT_SIZES[0]} is {job[ROLLOUT_SIZES[0]]:,} by default, "
            f"which does not divide {job.devices:,} devices."
        )
    return found


def _data(job: VerlJob) -> list[str]:
    num_prompts, found = job["num_prompts"], []
    if num_prompts is not None and num_prompts % job.prompts:
        found.append(
            f"the last {counted(num_prompts % job.prompts, 'prompt')} of {num_prompts:,} are dropped each time the data set "
            "is read."
        )
    if job["data.gen_batch_size"] is not None:
        if job.v1 and job.mode != "sync":
            found.append(f"data.gen_batch_size is set to 1 by trainer_mode={job.mode}, whatever the file says.")
        elif not job.v1 and job.prompts != job[TRAIN]:
            found.append(
                f"with the older trainer a step has data.gen_batch_size={job.prompts:,} prompts, not {TRAIN}={job[TRAIN]:,}."
            )
    return found
