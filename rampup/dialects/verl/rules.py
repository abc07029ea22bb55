"""The rules of veRL: those of its own check, and those that only the run finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from rampup.dialects.nearest import Rule
from rampup.dialects.rules import divisors, multiples, positive, where_usable
from rampup.dialects.verl.job import (
    ACTOR,
    COUNTS,
    CRITIC_COUNTS,
    REF,
    RESPONSES,
    ROLLOUT,
    STATIC_COUNTS,
    TRAIN,
    Role,
    VerlJob,
)

MINI, MICRO, OLD_MICRO = (f"{ACTOR}.ppo_{name}" for name in ("mini_batch_size", "micro_batch_size_per_gpu", "micro_batch_size"))
CRITIC_MICRO, CRITIC_OLD_MICRO = "critic.ppo_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size"


def train_sizes(job: VerlJob) -> list[int]:
    """Return sizes near data.train_batch_size that may suit the check, the mini batch and every replica."""
    responses, mini = job.samples_per_prompt, job.role("actor").mini
    minimal = job.minimal_batch or 1
    wanted = math.lcm(minimal, job.data_parallel_size("actor"), job[f"{ROLLOUT}.agent.num_workers"])
    stride = wanted // math.gcd(wanted, responses)
    checked = minimal // math.gcd(minimal, responses)
    return multiples(job[TRAIN], mini, checked, stride, math.lcm(stride, mini))


def mini_sizes(role: Callable[[VerlJob], Role]) -> Callable[[VerlJob], Iterable[int]]:
    """Return what yields sizes near a mini batch's."""

    def sizes(job: VerlJob) -> Iterable[int]:
        own = role(job)
        stride = own.data_parallel_size // math.gcd(own.data_parallel_size, job.samples_per_prompt)
        return sorted(
            {*divisors(job[TRAIN]), *multiples(own.mini, stride), *range(1, 33)}, key=lambda n: (abs(n - own.mini), n)
        )

    return sizes


def one_of_two(name: str, old: str, new: str, *, applies: Callable[[VerlJob], bool], total: Callable[[VerlJob], int]) -> Any:
    """Return the rules that exactly one of a deprecated key and its successor is set."""

    def values(job: VerlJob) -> tuple[Any, Any]:
        return job[old], job.critic_micro_per_gpu if new == CRITIC_MICRO else job[new]

    return (
        Rule(
            name=f"verl.{name}_given",
            keys=(new,),
            holds=lambda job: not applies(job) or values(job) != (None, None),
            message=lambda job: f"{new} must be set (or a token budget used, {ACTOR}.use_dynamic_bsz)",
            candidates=lambda job: sorted(divisors(total(job)), key=lambda n: (n > 8, -n if n <= 8 else n)),
        ),
        Rule(
            name=f"verl.{name}_given_once",
            keys=(old, new),
            holds=lambda job: not applies(job) or None in values(job),
            message=lambda job: (
                f"{old}={values(job)[0]:,} and {new}={values(job)[1]:,} must not both be set"
                + (
                    "; the second is the first by default, so the first can never be used"
                    if new == CRITIC_MICRO and new not in job.settings.given
                    else "; the first is deprecated"
                )
            ),
            candidates=lambda job: [None],
        ),
    )


def _static(job: VerlJob) -> bool:
    return not job.dynamic


def _critic_static(job: VerlJob) -> bool:
    return job.has_critic and not job.critic_dynamic


def _actor(job: VerlJob) -> Role:
    return job.role("actor")


def _critic(job: VerlJob) -> Role:
    return job.role("critic")


def _per_replica(job: VerlJob, model: str = "actor") -> int:
    return job.filled_part_samples // job.data_parallel_size(model)


def _deprecated_micro(name: str, key: str, role: Callable[[VerlJob], Role], applies: Callable[[VerlJob], bool]) -> Any:
    """The check's rules for a deprecated micro batch size, which counts the whole job's samples."""
    shared = f"{ACTOR if name == 'actor' else 'critic'}.ulysses_sequence_parallel_size"

    def given(job: VerlJob) -> bool:
        return applies(job) and job[key] is not None

    def share(job: VerlJob) -> int:
        return int(job[shared]) if job.strategy(name) in ("fsdp", "fsdp2") else 1

    def wide(job: VerlJob) -> bool:
        checked = name == "actor" or job.strategy(name) in ("fsdp", "fsdp2")
        return not given(job) or not checked or job[key] * share(job) >= job.devices

    return (
        Rule(
            name=f"verl.{name}_old_micro_divides_mini",
            keys=(key, role_key(name)),
            holds=lambda job: not given(job) or role(job).mini % job[key] == 0,
            message=lambda job: f"{role(job).key}={role(job).mini:,} must be a multiple of {key}={job[key]:,}",
            candidates=lambda job: [*divisors(role(job).mini, near=job[key]), None],
        ),
        Rule(
            name=f"verl.{name}_old_micro_reaches_every_device",
            keys=(key, shared),
            holds=wide,
            message=lambda job: (
                f"{key} * {shared} = {job[key]:,} * {share(job):,} must be at least the {job.devices:,} devices"
            ),
            candidates=lambda job: [*divisors(role(job).mini, near=job[key]), *range(job.devices, job.devices + 64), None],
        ),
    )


def role_key(name: str) -> str:
    """Return the key of a model's mini batch."""
    return MINI if name == "actor" else "critic.ppo_mini_batch_size"


_CHECK: list[Rule[VerlJob]] = [
    Rule(
        name="verl.megatron_divides_devices",
        keys=("trainer.n_gpus_per_node", f"{ACTOR}.megatron.tensor_model_parallel_size"),
        holds=lambda job: not _megatron_bad(job, "actor") or job.dynamic,
        message=lambda job: _megatron_message(job, "actor"),
        candidates=lambda job: multiples(job["trainer.n_gpus_per_node"], 1),
    ),
    Rule(
        name="verl.samples_fill_minimal_batch",
        keys=(TRAIN, RESPONSES),
        holds=lambda job: (
            job.dynamic or job.minimal_batch is None or job[TRAIN] * job.samples_per_prompt % job.minimal_batch == 0
        ),
        message=lambda job: (
            f"{TRAIN} * {RESPONSES} = {job[TRAIN]:,} * {job.samples_per_prompt:,} = {job[TRAIN] * job.samples_per_prompt:,} "
            f"samples must be a multiple of {job.minimal_batch:,}, "
            + (
                "the replicas times the micro batch size"
                if job.strategy("actor") == "megatron"
                else "the devices"
                + (
                    f" (the run itself would need the {job.data_parallel_size('actor'):,} replicas only: the check ignores "
                    "that devices share a sequence)"
                    if job.data_parallel_size("actor") != job.devices
                    else ""
                )
            )
        ),
        candidates=train_sizes,
    ),
    *one_of_two("actor_micro", OLD_MICRO, MICRO, applies=_static, total=lambda job: _actor(job).per_replica),
    Rule(
        name="verl.megatron_micro_per_gpu_needed",
        keys=(MICRO, OLD_MICRO),
        holds=lambda job: (
            job.dynamic or job.strategy("actor") != "megatron" or job[MICRO] is not None or job[OLD_MICRO] is None
        ),
        message=lambda job: (
            f"{MICRO} must be set with Megatron: the check multiplies it; {OLD_MICRO}={job[OLD_MICRO]:,} is deprecated"
        ),
        candidates=lambda job: divisors(job.role("actor").per_replica),
    ),
    Rule(
        name="verl.mini_at_most_train",
        keys=(MINI, TRAIN),
        holds=lambda job: job.dynamic or job[TRAIN] >= _actor(job).mini,
        message=lambda job: f"{MINI}={_actor(job).mini:,} must be at most {TRAIN}={job[TRAIN]:,}; both count prompts",
        candidates=mini_sizes(_actor),
    ),
    *_deprecated_micro("actor", OLD_MICRO, _actor, _static),
    Rule(
        name="verl.sequence_parallel_needs_packing",
        keys=("actor_rollout_ref.model.use_remove_padding", f"{ACTOR}.ulysses_sequence_parallel_size"),
        holds=lambda job: (
            job.strategy("actor") not in ("fsdp", "fsdp2")
            or job[f"{ACTOR}.ulysses_sequence_parallel_size"] <= 1
            or job["actor_rollout_ref.model.use_remove_padding"]
        ),
        message=lambda job: (
            f"{ACTOR}.ulysses_sequence_parallel_size={job[f'{ACTOR}.ulysses_sequence_parallel_size']:,} needs "
            "actor_rollout_ref.model.use_remove_padding=true"
        ),
        candidates=lambda job: [True],
    ),
    *one_of_two(
        "rollout_micro",
        f"{ROLLOUT}.log_prob_micro_batch_size",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        applies=_static,
        total=_per_replica,
    ),
    *one_of_two(
        "ref_micro",
        f"{REF}.log_prob_micro_batch_size",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        applies=lambda job: _static(job) and job.has_ref,
        total=lambda job: _per_replica(job, "ref"),
    ),
    *one_of_two("critic_micro", CRITIC_OLD_MICRO, CRITIC_MICRO, applies=_critic_static, total=lambda job: _critic(job).mini),
    *_deprecated_micro("critic", CRITIC_OLD_MICRO, _critic, _critic_static),
    Rule(
        name="verl.critic_mini_at_most_train",
        keys=("critic.ppo_mini_batch_size", TRAIN),
        holds=lambda job: not _critic_static(job) or job[TRAIN] >= _critic(job).mini,
        message=lambda job: (
            f"critic.ppo_mini_batch_size={_critic(job).mini:,} must be at most {TRAIN}={job[TRAIN]:,}; both count prompts"
        ),
        candidates=mini_sizes(_critic),
    ),
]


def _megatron_bad(job: VerlJob, model: str) -> bool:
    return model in job.models and job.strategy(model) == "megatron" and job.devices % max(job.model_size(model), 1) != 0


def _megatron_message(job: VerlJob, model: str) -> str:
    return (
        f"the {job.devices:,} devices must be a multiple of the {model}'s tensor * pipeline * context parallel size = "
        f"{job.model_size(model):,}"
    )


def _has_replica(model: str) -> Rule[VerlJob]:
    prefix = {"actor": ACTOR, "ref": REF, "critic": "critic"}[model]
    key = f"{prefix}.{'fsdp' if model == 'critic' else 'fsdp_config'}.ulysses_sequence_parallel_size"
    return Rule(
        name=f"verl.{model}_has_a_replica",
        keys=("trainer.n_gpus_per_node", key),
        holds=lambda job: model not in job.models or job.data_parallel_size(model) >= 1 or _megatron_bad(job, model),
        message=lambda job: (
            f"{model}: {job.devices:,} devices // {job.model_size(model):,} that share a sample = 0 replicas; at least 1 is "
            "needed"
        ),
        candidates=lambda job: multiples(job["trainer.n_gpus_per_node"], 1, job.model_size(model)),
        found_by="run",
    )


def _megatron_runs(model: str) -> Rule[VerlJob]:
    """Megatron cannot start on such devices; for a static actor the check has said so already."""
    return Rule(
        name=f"verl.megatron_starts_{model}",
        keys=("trainer.n_gpus_per_node",),
        holds=lambda job: not _megatron_bad(job, model) or (model == "actor" and not job.dynamic),
        message=lambda job: _megatron_message(job, model),
        candidates=lambda job: multiples(job["trainer.n_gpus_per_node"], 1),
        found_by="run",
    )


_FIRST: list[Rule[VerlJob]] = [
    *[
        positive(
            "verl",
            key,
            found_by="validator" if key.startswith("trainer.n") else "run",
            why="the run divides by it or stays empty",
        )
        for key in COUNTS
    ],
    *[
        positive("verl", key, found_by="run", why="the run divides by it", applies=lambda job: not job.dynamic)
        for key in STATIC_COUNTS
    ],
    *[
        positive("verl", key, found_by="run", why="the critic needs it", applies=lambda job: job.has_critic)
        for key in CRITIC_COUNTS
    ],
    *[positive("verl", key, found_by="run", why="nothing would be trained") for key in ("num_prompts", "trainer.total_epochs")],
    *[_has_replica(model) for model in ("actor", "critic", "ref")],
    *[_megatron_runs(model) for model in ("actor", "critic", "ref")],
]
CHECK_RULES = [*_FIRST, *where_usable(_CHECK)]
