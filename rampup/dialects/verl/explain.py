"""veRL's sizes in words: what each means, how a step runs, what surprises, and what to change when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator

from rampup.dialects import verl as keys
from rampup.dialects.rollout import batch_meanings, dropped_prompts
from rampup.dialects.rollout import flow as step_flow
from rampup.dialects.verdict import Advice, Words, counted, rounded_down
from rampup.dialects.verl import ACTOR, BUDGET, LOG_PROB, MICRO, MINI, RESPONSES, TRAIN
from rampup.dialects.verl.job import CRITIC_BUDGET, VerlJob

TUNING, EXPLAINED = "veRL's performance tuning guide", "veRL's explanation of its keys"
GUIDE = "a community guide to veRL"
MAX_UTILIZATION = 0.7
LONG = 8_192  # tokens of a sequence from which activations, not the state, fill a device


def _meanings(job: VerlJob) -> Iterator[tuple[str, str]]:
    actor, share = job.policy, job.step_share()
    prompts = f"{MINI} * require_batches = {job.policy.mini_batch:,} * {job.num_mini_batches(job.policy):,}"
    if not job.fully_async:
        prompts = TRAIN if job.prompts == job[TRAIN] else keys.GEN
    if job.distills:
        yield from batch_meanings(job, prompts, "one response per prompt", "one mini batch", "one pass over it")
    else:
        yield from batch_meanings(job, prompts, RESPONSES, MINI, keys.EPOCHS)
    yield (
        f"{counted(job.devices, 'device')} / {job.model_sizes['actor']:,} that share a sample ({job.strategies['actor']})",
        f"{counted(actor.replicas, 'replica')}; each has {counted(actor.share, 'sample')} of a mini batch",
    )
    if job.distills:
        tokens = f"about {job.token_budget:,} tokens" if job.dynamic else "samples"
        yield keys.DISTILL_BUDGET if job.dynamic else keys.DISTILL_MICRO, f"{tokens} per replica: {job.passes_text} per step"
    elif job.dynamic:
        yield BUDGET, f"about {job.token_budget:,} tokens per replica and pass: {job.passes_text}"
    else:
        yield MICRO, f"samples per replica (not per device): {job.passes_text} per optimizer step"
        passes = counted(-(-share // job[LOG_PROB]), "pass") if job[LOG_PROB] else "not set"
        yield LOG_PROB, f"samples per replica in log-probability passes: {passes} over {counted(share, 'sample')}"
    if job.padded_samples:
        yield "", f"{counted(job.padded_samples, 'short artificial sample')} added to each step"
    yield from _memory_meanings(job)


def _memory_meanings(job: VerlJob) -> Iterator[tuple[str, str]]:
    """Yield what the given memory settings trade, in this file's numbers."""
    given, tensor = job.settings.given, keys.ROLLOUT_SIZES[0]
    if tensor in given and job.rollout_devices % job.rollout_size == 0:
        weights = f"1/{job[tensor]:,} of the weights" if job[tensor] > 1 else "all weights"
        yield (
            tensor,
            f"{counted(job.rollout_devices // job.rollout_size, 'engine')}; each device has {weights}, and the rest of "
            f"{job[keys.UTILIZATION]:.0%} of its memory for the KV cache: a larger size leaves more for the cache and makes "
            "fewer engines",
        )
    elif keys.UTILIZATION in given:
        yield keys.UTILIZATION, "share of a device's memory for an engine's weights and KV cache; training has the rest"
    size = job[keys.FSDP_SIZE]
    if job.strategies["actor"].startswith("fsdp") and 0 < size < job.devices:
        yield (
            keys.FSDP_SIZE,
            f"{counted(job.devices // size, 'copy')} of the model, each over {counted(size, 'device')}: less communication, "
            f"and {job.devices / size:.3g} times the parameters and optimizer state per device",
        )
    engine = "megatron" if job.strategies["actor"] == "megatron" else "fsdp_config"
    for key in keys.OFFLOADS:
        if job[key] and f".{engine}." in key:
            yield key, "kept in host memory while it is not used: frees memory for generation, costs transfers in each step"


def _flow(job: VerlJob) -> Iterator[str]:
    prepare, part, padded = [], job.part_samples, job.padded_part_samples
    if job.sync_step > 1:
        times = f"run the following stages {job.sync_step:,} times, with {counted(part, 'sample')} each"
        prepare.append(f"{times}, before the weights are sent")
    if padded > part:
        size = f"{counted(padded, 'sample')}, of which {padded - part:,} are artificial"
        prepare.append(f"pad to a multiple of {job.required_multiple:,}: {size}")
    order = (
        "balanced by total length"
        if (job["trainer.balance_batch"] or job.v1) and not job.distills
        else "in the order of generation"
    )
    replicas = counted(job.policy.replicas, "replica")
    if job.distills:
        prepare.append("ask the teacher for its most likely tokens at every position")
    prepare.append(f"dispatch: each of {replicas} gets {counted(job.step_share(), 'sample')}, {order}")
    models = "log-probabilities of the actor" + (" and the reference" if job.has_ref else "")
    share = job.policy.share
    if not job.distills:
        prepare += [models + ("; values of the critic" if job.critic else ""), "advantages, on the controller"]
    return step_flow(
        job,
        generated=" over the engines",
        prepare=prepare,
        layout=[f"mini batch j on a replica is its own samples j * {share:,} to (j + 1) * {share:,} - 1"],
        last="advance the learning rate, once; send the actor's weights to the engines, once",
    )


def _advice(job: VerlJob) -> Iterator[Advice]:
    if job.distills:
        return
    yield from [
        Advice("train_batch_size equal to ppo_mini_batch_size with one epoch keeps training on-policy", EXPLAINED,
            job.updates(job.policy) == 1, f"{counted(job.updates(job.policy), 'update')} per rollout"),
        Advice("a token budget (use_dynamic_bsz) instead of a count of samples is faster if lengths vary", TUNING, job.dynamic,
            "it is on" if job.dynamic else "it is off"),
    ]  # fmt: skip
    if job.dynamic:
        yield from [
            Advice("the token budget is at least twice the longest sequence", TUNING, job[BUDGET] >= 2 * job.longest,
                f"{job[BUDGET]:,} compared with 2 * {job.longest:,}"),
            Advice("a micro batch never exceeds the token budget", EXPLAINED, None,
                "until August 2026 the budget gave only the number of parts, which are balanced by work and may exceed it"),
        ]  # fmt: skip
    elif job.micro and job[LOG_PROB]:
        yield Advice("forward-only micro batches are larger than those of training; start with twice the size", TUNING,
            job[LOG_PROB] >= 2 * job.micro,
            f"{job[LOG_PROB]:,} compared with {job.micro:,}")  # fmt: skip
    yield from _memory_advice(job)


def _memory_advice(job: VerlJob) -> Iterator[Advice]:
    """Yield what to change when memory runs out, only where this file leaves it undone."""
    actor, strategy = job.policy, job.strategies["actor"]
    if not job[keys.CHECKPOINTING]:
        yield Advice("gradient checkpointing is the first answer to a lack of memory, before any batch size", TUNING, False,
            f"{keys.CHECKPOINTING} is off, so all activations of a pass are kept")  # fmt: skip
    sequence = keys.SEQUENCE["actor"] if strategy.startswith("fsdp") else f"{ACTOR}.{strategy}.context_parallel_size"
    if job.longest > LONG and job.model_sizes["actor"] == 1 and actor.replicas % 2 == 0 and strategy != "veomni":
        yield Advice("for long sequences raise sequence parallelism before shrinking the micro batch", GUIDE, False,
            f"a device holds whole sequences of {job.longest:,} tokens; {sequence}=2 halves that, and the data-parallel size "
            f"falls from {actor.replicas:,} to {actor.replicas // 2:,}, so a replica gets {2 * actor.share:,} samples of a "
            f"mini batch instead of {actor.share:,}")  # fmt: skip
    if job.micro is not None and job.micro > 1:
        yield Advice("start at a micro batch of 1 and grow it while memory is left", GUIDE, False,
            f"it is {job.micro:,}; with 1 a pass needs about 1/{job.micro:,} of the activations, in {actor.share:,} passes "
            f"instead of {job.passes or 0:,}")  # fmt: skip
    shared = job.rollout_devices == job.devices and not job.fully_async and job.mode != "separate_async"
    if shared and job[keys.UTILIZATION] > MAX_UTILIZATION and not any(job[key] for key in keys.OFFLOADS):
        yield Advice(
            f"gpu_memory_utilization between 0.5 and {MAX_UTILIZATION}, unless parameters and optimizer states are offloaded",
            TUNING,
            False,
            f"it is {job[keys.UTILIZATION]:g}, training and generation share the devices, and nothing is offloaded",
        )


def _notes(job: VerlJob) -> Iterator[str]:
    if job.distills:
        yield (
            "distillation from a served teacher (gkd), which does not call veRL's check: one response to each prompt and one "
            f"update per step, whatever {RESPONSES}, {MINI} and {MICRO} are."
        )
        yield from _data_notes(job)
        return
    yield f"{TRAIN}, {MINI} and the critic's count prompts; sizes per gpu count samples of one data-parallel replica."
    if job.fully_async:
        yield (
            "fully asynchronous training, which does not call veRL's check: a step takes async_training.require_batches = "
            f"{counted(job.num_mini_batches(job.policy), 'mini batch')} from the queue of generated samples, and the generator "
            f"gets new weights every {counted(job[keys.ASYNC_SYNC] or 4, 'step')}, so samples may be older than that."
        )
    for model in job.models:
        if job.devices % job.model_sizes[model]:
            devices = f"the {model}'s {job.devices:,} devices"
            yield f"{rounded_down(devices, job.model_sizes[model], 'veRL', job.replicas[model])}."
    if job.padded_samples:
        padded = counted(job.padded_samples, "short artificial sample")
        yield (
            f"the newer trainer adds {padded} so that every mini batch is full; the "
            "loss still divides by full mini batches. trainer.use_v1=false fails instead."
        )
    if job.dynamic:
        yield "with a token budget veRL skips most of its checks of sizes and ignores micro batch sizes."
        if job.token_budget < job.longest:
            yield (
                f"{BUDGET} * devices that share a sequence = {job.token_budget:,} tokens is less than the longest sequence, "
                f"{job.longest:,}: the first such sequence stops the run."
            )
    if job.critic is not None and not job.legacy:
        yield (
            "the critic's micro sizes and token budget never reach its engine: it fills its passes by tokens, "
            f"{CRITIC_BUDGET:,} of them, regardless of {keys.CRITIC_MICRO} and critic.use_dynamic_bsz."
        )
        if job[keys.OLD_SEQUENCE["critic"]] > 1 and not job.legacy:
            old, new = keys.OLD_SEQUENCE["critic"], keys.SEQUENCE["critic"]
            yield f"{old} is read by the check alone; the critic's engine reads {new}."
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
        keys.OLD_SEQUENCE["actor"]: keys.SEQUENCE["actor"],
        "data.val_batch_size": "nothing: validation is dispatched as a whole",
    }
    for old, new in deprecated.items():
        if old in job.settings.given and job[old] is not None:
            yield f"{old} is deprecated; use {new}." + ("" if job.legacy else " (verl_version=legacy is for older veRL)")
    for name, key in keys.SHELL_NAMES.items():
        if name in job.settings.others:
            yield f"{name} is not a key of veRL but a shell variable of its examples; the key is {key}."
    if not job.settings.given & set(keys.ROLLOUT_SIZES) and job.rollout_devices % job.rollout_size:
        size = keys.ROLLOUT_SIZES[0]
        yield (
            f"the file does not size the inference engines, and {size} is {job[size]:,} by default, "
            f"which does not divide {counted(job.rollout_devices, 'device')}."
        )
    strategy, given = job.strategies["actor"], job[f"{ACTOR}.strategy"]
    if given not in (None, strategy) and job.foreign_strategy(f"{ACTOR}.strategy") is None:
        yield f"{ACTOR}.strategy={given} is read by the check alone; the engine is {strategy}, by model_engine."
    sequence = max(job[keys.OLD_SEQUENCE["actor"]], job[keys.SEQUENCE["actor"]])
    if sequence > 1 and not strategy.startswith("fsdp"):
        own = "ulysses_parallel_size" if strategy == "veomni" else "context_parallel_size"
        yield (
            f"ulysses_sequence_parallel_size={sequence:,} has no effect with {strategy}; devices share a sequence by "
            f"{ACTOR}.{strategy}.{own}."
        )


def _data_notes(job: VerlJob) -> Iterator[str]:
    if not job.fully_async:
        yield from dropped_prompts(job)
    given = job[keys.GEN]
    if job.fetches_one and given not in (None, 1):
        why = f"trainer_mode={job.mode}" if job.mode != "sync" else keys.FILTER if job[keys.FILTER] else keys.REFILL
        yield f"{why} sets {keys.GEN} to 1, regardless of the file."
    elif job[keys.FILTER] and not job.v1:
        yield (
            f"DAPO generates for {given or job[TRAIN]:,} prompts at a time, until {TRAIN}={job[TRAIN]:,} of them have "
            "responses that are not all alike; the rest are dropped."
        )
    elif given is not None and not job.v1 and not job.fully_async and job.prompts != job[TRAIN]:
        yield f"with the older trainer a step has {keys.GEN}={job.prompts:,} prompts, not {TRAIN}={job[TRAIN]:,}."


WORDS = Words(_meanings, _flow, _notes, _advice)
