"""The rules of veRL: those of its own check, and those that only the run finds, where trainers and workers assert them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rampup.dialects.reading import read_settings
from rampup.dialects.rules import Dialect, Rule, Term, divisors, if_usable, multiple, positive, product, value_of
from rampup.dialects.verl import (
    ACTOR,
    CRITIC_MICRO,
    CRITIC_MINI,
    DYNAMIC,
    KEYS,
    LOG_PROB,
    MICRO,
    MINI,
    OLD_CRITIC_MICRO,
    OLD_LOG_PROB,
    OLD_MICRO,
    OLD_REF_LOG_PROB,
    OLD_SEQUENCE,
    REF_LOG_PROB,
    RESPONSES,
    ROLLOUT,
    ROLLOUT_SIZES,
    SEQUENCE,
    TRAIN,
    WORKERS,
    explain,
)
from rampup.dialects.verl.job import COUNTS, CRITIC_COUNTS, STATIC_COUNTS, Trained, VerlJob

DEVICES = "trainer.n_gpus_per_node"
PACKING = "actor_rollout_ref.model.use_remove_padding"
Rules = list[Rule[VerlJob]]


def _static(job: VerlJob) -> bool:
    return not job.dynamic


def _critic_static(job: VerlJob) -> bool:
    return job.has_critic and not job.critic_dynamic


def _actor(job: VerlJob) -> Trained:
    return job.actor


def _critic(job: VerlJob) -> Trained:
    assert job.critic is not None
    return job.critic


def _mini(model: Callable[[VerlJob], Trained]) -> Callable[[VerlJob], Term]:
    return lambda job: Term(f"{model(job).key}={model(job).mini:,}", model(job).mini)


def _mini_samples(job: VerlJob, model: Trained) -> Term:
    return product({model.key: model.mini, RESPONSES: job.samples_per_prompt}, "samples")


# Devices and replicas.


def _is_uneven(job: VerlJob, model: str) -> bool:
    """Return whether Megatron's sizes do not divide the devices of a model that takes part."""
    size = max(job.model_sizes[model], 1)
    return model in job.models and job.strategies[model] == "megatron" and job.devices % size != 0


def _device_message(model: str) -> Callable[[VerlJob], str]:
    return lambda job: (
        f"the {job.devices:,} devices must be a multiple of the {model}'s tensor * pipeline * context parallel size = "
        f"{job.model_sizes[model]:,}"
    )


def _has_a_replica(model: str) -> Rule[VerlJob]:
    return Rule(
        name=f"verl.{model}_has_a_replica",
        keys=(DEVICES, SEQUENCE[model]),
        when=lambda job: model in job.models and not _is_uneven(job, model),
        holds=lambda job: job.replicas[model] >= 1,
        message=lambda job: (
            f"{model}: {job.devices:,} devices // {job.model_sizes[model]:,} that share a sample = 0 replicas; at least 1 is "
            "needed"
        ),
        division=lambda job: (job.devices, job.model_sizes[model]),
        found_by="run",
    )


def _megatron_starts(model: str) -> Rule[VerlJob]:
    """Return the rule that Megatron can start on the devices. The check tests it for the actor of a static batch."""
    return Rule(
        name=f"verl.megatron_starts_{model}",
        keys=(DEVICES,),
        when=lambda job: model != "actor" or job.dynamic,
        holds=lambda job: not _is_uneven(job, model),
        message=_device_message(model),
        division=lambda job: (job.devices, job.model_sizes[model]),
        found_by="run",
    )


_NODE_COUNTS = (DEVICES, "trainer.nnodes")
_DEVICES: Rules = [
    *[
        rule
        for key in COUNTS
        for rule in positive(
            "verl", [key], why="the run divides by it or stays empty", found_by="validator" if key in _NODE_COUNTS else "run"
        )
    ],
    *positive("verl", STATIC_COUNTS, why="the run divides by it", found_by="run", when=_static),
    *positive("verl", CRITIC_COUNTS, why="the critic needs it", found_by="run", when=lambda job: job.has_critic),
    *positive("verl", ["num_prompts", "trainer.total_epochs"], why="nothing would be trained", found_by="run"),
    *map(_has_a_replica, ("actor", "critic", "ref")),
    *map(_megatron_starts, ("actor", "critic", "ref")),
]


# veRL's own check. A token budget skips most of it.


def _one_of_two(name: str, old: str, new: str, *, when: Callable[[VerlJob], bool], total: Callable[[VerlJob], int]) -> Rules:
    """Return the rules that exactly one of a deprecated micro size and its successor is set."""

    def new_value(job: VerlJob) -> int | None:
        return job.critic_micro if new == CRITIC_MICRO else job[new]

    def note(job: VerlJob) -> str:
        if new == CRITIC_MICRO and new not in job.settings.given:
            return "the second is the first by default, so the first can never be used"
        return "the first is deprecated"

    return [
        Rule(
            name=f"verl.{name}_given",
            keys=(new,),
            when=when,
            holds=lambda job: job[old] is not None or new_value(job) is not None,
            message=lambda job: f"{new} must be set (or a token budget used, {DYNAMIC})",
            # The largest divisor up to 8 is a good start.
            candidates=lambda job: sorted(divisors(total(job)), key=lambda n: (n > 8, -n if n <= 8 else n)),
        ),
        Rule(
            name=f"verl.{name}_given_once",
            keys=(old, new),
            when=when,
            holds=lambda job: job[old] is None or new_value(job) is None,
            message=lambda job: f"{old}={job[old]:,} and {new}={new_value(job):,} must not both be set; {note(job)}",
            candidates=lambda job: [None],
        ),
    ]


def _deprecated_micro(model: Callable[[VerlJob], Trained], name: str, key: str, when: Callable[[VerlJob], bool]) -> Rules:
    """Return the check's rules for a deprecated micro batch size, which counts the samples of the whole job."""
    sequence = OLD_SEQUENCE[name]

    def fsdp(job: VerlJob) -> bool:
        return job.strategies[name] in ("fsdp", "fsdp2")

    def given(job: VerlJob) -> bool:
        return when(job) and job[key] is not None

    def width(job: VerlJob) -> Term:
        return product({key: job[key], sequence: job[sequence] if fsdp(job) else 1})

    return [
        multiple(
            f"verl.{name}_old_micro_divides_mini",
            (key, CRITIC_MINI if name == "critic" else MINI),
            _mini(model),
            value_of(key),
            when=given,
            candidates=lambda job: [*sorted(divisors(model(job).mini), key=lambda n: (abs(n - job[key]), n)), None],
        ),
        Rule(
            name=f"verl.{name}_old_micro_reaches_every_device",
            keys=(key, sequence),
            when=lambda job: given(job) and (name == "actor" or fsdp(job)),
            holds=lambda job: width(job).number >= job.devices,
            message=lambda job: f"{width(job).text} must be at least the {job.devices:,} devices",
            candidates=lambda job: [
                *sorted(divisors(model(job).mini), key=lambda n: (abs(n - job[key]), n)),
                *range(job.devices, job.devices + 64),
                None,
            ],
        ),
    ]


def _minimal_batch(job: VerlJob) -> Term:
    text = "the replicas times the micro batch size" if job.strategies["actor"] == "megatron" else "the devices"
    if text == "the devices" and job.replicas["actor"] != job.devices:
        text += (
            f" (the run itself would need only the {job.replicas['actor']:,} replicas: the check ignores that devices share a "
            "sequence)"
        )
    return Term(f"{job.minimal_batch or 0:,}, {text}", job.minimal_batch or 0)


_CHECK: Rules = [
    Rule(
        name="verl.megatron_divides_devices",
        keys=(DEVICES, f"{ACTOR}.megatron.tensor_model_parallel_size"),
        when=_static,
        holds=lambda job: not _is_uneven(job, "actor"),
        message=_device_message("actor"),
        division=lambda job: (job.devices, job.model_sizes["actor"]),
    ),
    multiple(
        "verl.samples_fill_minimal_batch",
        (TRAIN, RESPONSES),
        lambda job: product({TRAIN: job[TRAIN], RESPONSES: job.samples_per_prompt}, "samples"),
        _minimal_batch,
        when=_static,
    ),
    *_one_of_two("actor_micro", OLD_MICRO, MICRO, when=_static, total=lambda job: job.actor.share),
    Rule(
        name="verl.megatron_micro_per_gpu_needed",
        keys=(MICRO, OLD_MICRO),
        when=lambda job: not job.dynamic and job.strategies["actor"] == "megatron" and job[OLD_MICRO] is not None,
        holds=lambda job: job[MICRO] is not None,
        message=lambda job: (
            f"{MICRO} must be set with Megatron: the check multiplies it; {OLD_MICRO}={job[OLD_MICRO]:,} is deprecated"
        ),
        division=lambda job: (job.actor.share, 1),
    ),
    Rule(
        name="verl.mini_at_most_train",
        keys=(MINI, TRAIN),
        when=_static,
        holds=lambda job: job[TRAIN] >= job.actor.mini,
        message=lambda job: f"{MINI}={job.actor.mini:,} must be at most {TRAIN}={job[TRAIN]:,}; both count prompts",
        division=lambda job: (job[TRAIN], job.actor.mini),
    ),
    *_deprecated_micro(_actor, "actor", OLD_MICRO, _static),
    Rule(
        name="verl.sequence_parallel_needs_packing",
        keys=(PACKING, OLD_SEQUENCE["actor"]),
        when=lambda job: job.strategies["actor"] in ("fsdp", "fsdp2") and job[OLD_SEQUENCE["actor"]] > 1,
        holds=lambda job: job[PACKING],
        message=lambda job: f"{OLD_SEQUENCE['actor']}={job[OLD_SEQUENCE['actor']]:,} needs {PACKING}=true",
        candidates=lambda job: [True],
    ),
    *_one_of_two("rollout_micro", OLD_LOG_PROB, LOG_PROB, when=_static, total=lambda job: job.step_share()),
    *_one_of_two(
        "ref_micro",
        OLD_REF_LOG_PROB,
        REF_LOG_PROB,
        when=lambda job: not job.dynamic and job.has_ref,
        total=lambda job: job.step_share("ref"),
    ),
    *_one_of_two("critic_micro", OLD_CRITIC_MICRO, CRITIC_MICRO, when=_critic_static, total=lambda job: _critic(job).mini),
    *_deprecated_micro(_critic, "critic", OLD_CRITIC_MICRO, _critic_static),
    Rule(
        name="verl.critic_mini_at_most_train",
        keys=(CRITIC_MINI, TRAIN),
        when=_critic_static,
        holds=lambda job: job[TRAIN] >= _critic(job).mini,
        message=lambda job: f"{CRITIC_MINI}={_critic(job).mini:,} must be at most {TRAIN}={job[TRAIN]:,}; both count prompts",
        division=lambda job: (job[TRAIN], _critic(job).mini),
    ),
]


# What only the run finds.


def _per_gpu_needed(name: str, old: str, new: str, when: Callable[[VerlJob], bool]) -> Rule[VerlJob]:
    """Return the rule against a deprecated key that passes the check, after which nothing reads it."""
    return Rule(
        name=f"verl.{name}_micro_per_gpu_needed",
        keys=(new, old),
        when=lambda job: not job.legacy and job[old] is not None and when(job),
        holds=lambda job: job[new] is not None,
        message=lambda job: (
            f"{new} must be set: {old}={job[old]:,} passes the check, but nothing reads it and the workers stop without "
            "a message"
        ),
        division=lambda job: (job.actor.share, 1),
        found_by="run",
    )


def _mini_divides(name: str, model: Callable[[VerlJob], Trained]) -> Rules:
    """Return what a worker asserts of its mini batch."""
    key = CRITIC_MINI if name == "critic" else MINI

    def applies(job: VerlJob) -> bool:
        return not job.legacy and name in job.models

    def step_share(job: VerlJob) -> Term:
        share = job.samples // model(job).replicas
        return Term(f"with trainer.use_v1=false each replica's {share:,} samples", share)

    return [
        multiple(
            f"verl.{name}_mini_divides_over_replicas",
            (key, RESPONSES),
            lambda job: _mini_samples(job, model(job)),
            lambda job: Term(f"the {name}'s {model(job).replicas:,} replicas", model(job).replicas),
            when=applies,
            found_by="run",
        ),
        multiple(
            f"verl.{name}_mini_divides_share",
            (TRAIN, key),
            step_share,
            lambda job: Term(f"its mini batch of {model(job).share:,}", model(job).share),
            when=lambda job: applies(job) and not job.v1 and model(job).mini_samples % model(job).replicas == 0,
            note="; the newer trainer would pad them",
            found_by="run",
        ),
    ]


def _log_prob(name: str, key: str, model: str, dynamic: Callable[[VerlJob], bool]) -> Rule[VerlJob]:
    """Return the rule that log-probability passes have equal sizes; the code until April 2026 allowed a remainder."""
    return multiple(
        f"verl.{name}_micro_divides_share",
        (key, TRAIN),
        lambda job: Term(f"each replica's {job.step_share(model):,} samples of a step", job.step_share(model)),
        value_of(key),
        when=lambda job: not job.legacy and model in job.models and not dynamic(job) and job[key] is not None,
        note=" when log-probabilities are computed",
        found_by="run",
    )


def _equal_chunks(model: str) -> Rule[VerlJob]:
    """Return the rule that samples divide over replicas; the newer trainer pads for the actor and the critic only."""
    return multiple(
        f"verl.samples_divide_over_{model}_replicas",
        (TRAIN, RESPONSES),
        lambda job: Term(f"{job.padded_part_samples:,} samples", job.padded_part_samples),
        lambda job: Term(f"the {model}'s {job.replicas[model]:,} replicas", job.replicas[model]),
        when=lambda job: model in job.models,
        note=": only equal chunks are dispatched",
        found_by="run",
    )


def _micro_share(name: str, model: Callable[[VerlJob], Trained]) -> Callable[[VerlJob], Term]:
    return lambda job: Term(
        f"a replica's mini batch, {model(job).mini_samples:,} samples // {model(job).replicas:,} replicas = "
        f"{model(job).share:,} samples,",
        model(job).share,
    )


_RUN: Rules = [
    Rule(
        name="verl.dynamic_everywhere",
        keys=(f"{ROLLOUT}.log_prob_use_dynamic_bsz", DYNAMIC),
        when=lambda job: not job.legacy,
        holds=lambda job: job.dynamic == job.rollout_dynamic,
        message=lambda job: (
            f"{ROLLOUT}.log_prob_use_dynamic_bsz={str(job.rollout_dynamic).lower()} must equal "
            f"{DYNAMIC}={str(job.dynamic).lower()}; the workers stop without a message"
        ),
        candidates=lambda job: [job.dynamic],
        found_by="run",
    ),
    _per_gpu_needed("actor", OLD_MICRO, MICRO, lambda job: not job.dynamic and job.strategies["actor"] != "megatron"),
    _per_gpu_needed("rollout", OLD_LOG_PROB, LOG_PROB, _static),
    _per_gpu_needed("ref", OLD_REF_LOG_PROB, REF_LOG_PROB, lambda job: job.has_ref and not job.ref_dynamic),
    *_mini_divides("actor", _actor),
    *_mini_divides("critic", _critic),
    multiple(
        "verl.micro_divides_mini",
        (MICRO, MINI),
        _micro_share("actor", _actor),
        value_of(MICRO),
        when=lambda job: not job.legacy and job.micro is not None,
        found_by="run",
    ),
    _log_prob("rollout", LOG_PROB, "actor", lambda job: job.rollout_dynamic),
    _log_prob("ref", REF_LOG_PROB, "ref", lambda job: job.ref_dynamic),
    *map(_equal_chunks, ("actor", "critic", "ref")),
    multiple(
        "verl.samples_divide_over_workers",
        (TRAIN, WORKERS),
        lambda job: Term(f"with trainer.use_v1=false the {job.samples:,} samples of a step", job.samples),
        value_of(WORKERS),
        when=lambda job: not job.v1 and not job.legacy,
        found_by="run",
    ),
    multiple(
        "verl.parts_divide_train",
        (TRAIN,),
        value_of(TRAIN),
        lambda job: Term(f"trainer.v1.{job.mode}.parameter_sync_step={job.sync_step:,}", job.sync_step),
        found_by="run",
    ),
    Rule(
        name="verl.part_is_one_mini_batch",
        keys=(TRAIN, MINI),
        when=lambda job: job.mode == "separate_async",
        holds=lambda job: job[TRAIN] == job.sync_step * job.actor.mini,
        message=lambda job: (
            f"trainer_mode=separate_async needs {TRAIN}={job[TRAIN]:,} equal to "
            f"{product({'parameter_sync_step': job.sync_step, MINI: job.actor.mini}).text}"
        ),
        division=lambda job: (job[TRAIN], job.sync_step * job.actor.mini),
        found_by="run",
    ),
    multiple(
        "verl.loader_divides_train",
        ("data.gen_batch_size", TRAIN),
        value_of(TRAIN),
        value_of("data.gen_batch_size"),
        when=lambda job: job.v1 and job.mode == "sync" and job["data.gen_batch_size"] is not None,
        found_by="run",
    ),
    multiple(
        "verl.engines_divide_devices",
        ROLLOUT_SIZES,
        lambda job: Term(f"the {job.devices:,} devices", job.devices),
        lambda job: Term(f"an engine's tensor * data * pipeline parallel size = {job.rollout_size:,}", job.rollout_size),
        when=lambda job: bool(job.settings.given & set(ROLLOUT_SIZES)),
        found_by="run",
    ),
    Rule(
        name="verl.data_set_fills_a_step",
        keys=("num_prompts", TRAIN),
        when=lambda job: job["num_prompts"] is not None,
        holds=lambda job: job["num_prompts"] >= job.prompts,
        message=lambda job: f"a data set of {job['num_prompts']:,} prompts must contain at least a step's {job.prompts:,}",
        division=lambda job: (job["num_prompts"], job.prompts),
        found_by="run",
    ),
]


def _legacy(name: str, model: Callable[[VerlJob], Trained], key: str, micro: Callable[[VerlJob], int | None]) -> Rules:
    """Return what the workers until April 2026 asserted of sizes per replica, each rounded down."""
    mini = CRITIC_MINI if name == "critic" else MINI

    def applies(job: VerlJob) -> bool:
        return job.legacy and name in job.models

    return [
        Rule(
            name=f"verl.legacy_{name}_mini_reaches_every_replica",
            keys=(mini, RESPONSES),
            when=applies,
            holds=lambda job: model(job).share > 0,
            message=lambda job: (
                f"{mini} * {RESPONSES} // replicas = {model(job).mini_samples:,} // {model(job).replicas:,} must be at least 1"
            ),
            division=lambda job: (model(job).mini_samples, model(job).replicas),
            found_by="run",
        ),
        Rule(
            name=f"verl.legacy_{name}_micro_divides_mini",
            keys=(key, mini),
            when=lambda job: applies(job) and micro(job) is not None and model(job).share > 0,
            holds=lambda job: (micro(job) or 0) > 0 and model(job).share % (micro(job) or 1) == 0,
            message=lambda job: (
                f"{_micro_share(name, model)(job).text} must be a multiple of its micro batch of {micro(job) or 0:,}"
            ),
            # The deprecated key counts the samples of all replicas.
            candidates=lambda job: [
                factor * scale
                for scale in (1, model(job).replicas)
                for factor in sorted(divisors(model(job).share), key=lambda n: (abs(n - (micro(job) or 1)), n))
            ],
            found_by="run",
        ),
    ]


RULES: Rules = [
    *_DEVICES,
    *if_usable(
        [
            *_CHECK,
            *_RUN,
            *_legacy("actor", _actor, MICRO, lambda job: job.micro),
            *_legacy("critic", _critic, CRITIC_MICRO, lambda job: None if job.critic_dynamic else job.critic_micro),
        ]
    ),
]
DIALECT = Dialect(read=partial(read_settings, entries=KEYS, system="veRL"), keys=KEYS, job=VerlJob, rules=RULES, words=explain)
