"""The rules of veRL that nothing checks before the run fails: what the trainers and workers assert, step by step."""

from __future__ import annotations

from collections.abc import Callable

from rampup.dialects.nearest import Rule
from rampup.dialects.rules import divisors, multiples, where_usable
from rampup.dialects.verl.job import ACTOR, REF, RESPONSES, ROLLOUT, ROLLOUT_SIZES, TRAIN, VerlJob
from rampup.dialects.verl.rules import CRITIC_MICRO, MICRO, MINI, OLD_MICRO, mini_sizes, role_key, train_sizes

DYNAMIC, LOG_PROB_DYNAMIC = f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"


def _today(job: VerlJob) -> bool:
    return not job.legacy


def _new_micro_needed(name: str, old: str, new: str, applies: Callable[[VerlJob], bool]) -> Rule[VerlJob]:
    """The deprecated key passes the check, and then nothing reads it."""
    return Rule(
        name=f"verl.{name}_micro_per_gpu_needed",
        keys=(new, old),
        holds=lambda job: not (_today(job) and applies(job) and job[old] is not None and job[new] is None),
        message=lambda job: (
            f"{new} must be set: {old}={job[old]:,} passes the check, but nothing reads it and the workers stop without "
            "a message"
        ),
        candidates=lambda job: divisors(job.role("actor").per_replica),
        found_by="run",
    )


def _mini_divides(name: str) -> list[Rule[VerlJob]]:
    """What a worker asserts of its mini batch."""

    def applies(job: VerlJob) -> bool:
        return _today(job) and (name == "actor" or job.has_critic)

    def share(job: VerlJob) -> int:
        return job.samples // job.role(name).data_parallel_size

    def splits(job: VerlJob) -> bool:
        return job.role(name).mini_samples % job.role(name).data_parallel_size == 0

    return [
        Rule(
            name=f"verl.{name}_mini_divides_over_replicas",
            keys=(role_key(name), RESPONSES),
            holds=lambda job: not applies(job) or splits(job),
            message=lambda job: (
                f"{job.role(name).key} * {RESPONSES} = {job.role(name).mini:,} * {job.samples_per_prompt:,} = "
                f"{job.role(name).mini_samples:,} samples must be a multiple of the {name}'s "
                f"{job.role(name).data_parallel_size:,} replicas"
            ),
            candidates=mini_sizes(lambda job: job.role(name)),
            found_by="run",
        ),
        Rule(
            name=f"verl.{name}_mini_divides_share",
            keys=(TRAIN, role_key(name)),
            holds=lambda job: (
                not applies(job)
                or job.v1
                or not splits(job)
                or not job.role(name).per_replica
                or share(job) % job.role(name).per_replica == 0
            ),
            message=lambda job: (
                f"with trainer.use_v1=false each replica's {share(job):,} samples must be a multiple of its mini batch of "
                f"{job.role(name).per_replica:,}; the newer trainer would fill them up"
            ),
            candidates=lambda job: [*train_sizes(job), *multiples(job[TRAIN], job.role(name).mini)],
            found_by="run",
        ),
    ]


def _equal_chunks(model: str) -> Rule[VerlJob]:
    """Samples are handed out in equal chunks; the newer trainer fills up for the actor and the critic only."""
    return Rule(
        name=f"verl.samples_divide_over_{model}_replicas",
        keys=(TRAIN, RESPONSES),
        holds=lambda job: model not in job.models or job.filled_part_samples % job.data_parallel_size(model) == 0,
        message=lambda job: (
            f"{job.filled_part_samples:,} samples must be a multiple of the {model}'s {job.data_parallel_size(model):,} "
            "replicas: only equal chunks are handed out"
        ),
        candidates=lambda job: [*train_sizes(job), *multiples(job[TRAIN], job.data_parallel_size(model))],
        found_by="run",
    )


def _log_prob(name: str, prefix: str, model: str) -> Rule[VerlJob]:
    """Log-probability passes must be of equal size; the code until April 2026 allowed a remainder."""
    key = f"{prefix}.log_prob_micro_batch_size_per_gpu"

    def share(job: VerlJob) -> int:
        return job.filled_part_samples // job.data_parallel_size(model)

    return Rule(
        name=f"verl.{name}_micro_divides_share",
        keys=(key, TRAIN),
        holds=lambda job: (
            job.legacy or model not in job.models or job.log_prob_dynamic(prefix) or not job[key] or share(job) % job[key] == 0
        ),
        message=lambda job: (
            f"each replica's {share(job):,} samples of a step must be a multiple of {key}={job[key]:,} when log-probabilities "
            "are computed"
        ),
        candidates=lambda job: divisors(share(job), near=job[key]),
        found_by="run",
    )


_TODAY: list[Rule[VerlJob]] = [
    Rule(
        name="verl.dynamic_everywhere",
        keys=(LOG_PROB_DYNAMIC, DYNAMIC),
        holds=lambda job: job.legacy or job.dynamic == job.log_prob_dynamic(ROLLOUT),
        message=lambda job: (
            f"{LOG_PROB_DYNAMIC}={str(job.log_prob_dynamic(ROLLOUT)).lower()} must equal {DYNAMIC}={str(job.dynamic).lower()}; "
            "the workers stop without a message"
        ),
        candidates=lambda job: [job.dynamic],
        found_by="run",
    ),
    _new_micro_needed("actor", OLD_MICRO, MICRO, lambda job: not job.dynamic and job.strategy("actor") != "megatron"),
    _new_micro_needed(
        "rollout",
        f"{ROLLOUT}.log_prob_micro_batch_size",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
        lambda job: not job.dynamic,
    ),
    _new_micro_needed(
        "ref",
        f"{REF}.log_prob_micro_batch_size",
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        lambda job: job.has_ref and not job.log_prob_dynamic(REF),
    ),
    *_mini_divides("actor"),
    *_mini_divides("critic"),
    Rule(
        name="verl.micro_divides_mini",
        keys=(MICRO, MINI),
        holds=lambda job: job.legacy or job.micro is None or job.role("actor").per_replica % job.micro == 0,
        message=lambda job: (
            f"a replica's mini batch, {MINI} * {RESPONSES} // replicas = {job.role('actor').mini:,} * "
            f"{job.samples_per_prompt:,} // {job.role('actor').data_parallel_size:,} = {job.role('actor').per_replica:,} "
            f"samples, must be a multiple of {MICRO}={job.micro:,}"
        ),
        candidates=lambda job: divisors(job.role("actor").per_replica, near=job.micro),
        found_by="run",
    ),
    _log_prob("rollout", ROLLOUT, "actor"),
    _log_prob("ref", REF, "ref"),
    *[_equal_chunks(model) for model in ("actor", "critic", "ref")],
    Rule(
        name="verl.samples_divide_over_workers",
        keys=(TRAIN, f"{ROLLOUT}.agent.num_workers"),
        holds=lambda job: job.v1 or job.legacy or job.samples % job[f"{ROLLOUT}.agent.num_workers"] == 0,
        message=lambda job: (
            f"with trainer.use_v1=false the {job.samples:,} samples of a step must be a multiple of "
            f"{ROLLOUT}.agent.num_workers={job[f'{ROLLOUT}.agent.num_workers']:,}"
        ),
        candidates=train_sizes,
        found_by="run",
    ),
    Rule(
        name="verl.parts_divide_train",
        keys=(TRAIN,),
        holds=lambda job: job[TRAIN] % job.sync_step == 0,
        message=lambda job: (
            f"{TRAIN}={job[TRAIN]:,} must be a multiple of trainer.v1.{job.mode}.parameter_sync_step={job.sync_step:,}"
        ),
        candidates=lambda job: multiples(job[TRAIN], job.sync_step),
        found_by="run",
    ),
    Rule(
        name="verl.part_is_one_mini_batch",
        keys=(TRAIN, MINI),
        holds=lambda job: job.mode != "separate_async" or job[TRAIN] == job.sync_step * job.role("actor").mini,
        message=lambda job: (
            f"trainer_mode=separate_async needs {TRAIN}={job[TRAIN]:,} equal to parameter_sync_step * {MINI} = "
            f"{job.sync_step:,} * {job.role('actor').mini:,} = {job.sync_step * job.role('actor').mini:,}"
        ),
        candidates=lambda job: [job.sync_step * job.role("actor").mini],
        found_by="run",
    ),
    Rule(
        name="verl.loader_divides_train",
        keys=("data.gen_batch_size", TRAIN),
        holds=lambda job: (
            not job.v1
            or job.mode != "sync"
            or job["data.gen_batch_size"] is None
            or job[TRAIN] % job["data.gen_batch_size"] == 0
        ),
        message=lambda job: f"{TRAIN}={job[TRAIN]:,} must be a multiple of data.gen_batch_size={job['data.gen_batch_size']:,}",
        candidates=lambda job: divisors(job[TRAIN], near=job["data.gen_batch_size"]),
        found_by="run",
    ),
    Rule(
        name="verl.engines_divide_devices",
        keys=(ROLLOUT_SIZES[0], *ROLLOUT_SIZES[1:]),
        holds=lambda job: not job.settings.given & set(ROLLOUT_SIZES) or job.devices % job.rollout_size == 0,
        message=lambda job: (
            f"the {job.devices:,} devices must be a multiple of an engine's tensor * data * pipeline parallel size = "
            f"{job.rollout_size:,}"
        ),
        candidates=lambda job: divisors(job.devices, near=job[ROLLOUT_SIZES[0]]),
        found_by="run",
    ),
    Rule(
        name="verl.data_set_fills_a_step",
        keys=("num_prompts", TRAIN),
        holds=lambda job: job["num_prompts"] is None or job["num_prompts"] >= job.prompts,
        message=lambda job: f"a data set of {job['num_prompts']:,} prompts must hold a step's {job.prompts:,}",
        candidates=lambda job: [job.prompts],
        found_by="run",
    ),
]


def _legacy_rules(name: str, micro: Callable[[VerlJob], int | None], key: str) -> list[Rule[VerlJob]]:
    """What the workers until April 2026 asserted of sizes per replica, each rounded down."""

    def applies(job: VerlJob) -> bool:
        return job.legacy and (name == "actor" or job.has_critic)

    def size(job: VerlJob) -> int:
        return micro(job) or 0

    return [
        Rule(
            name=f"verl.legacy_{name}_mini_reaches_every_replica",
            keys=(role_key(name), RESPONSES),
            holds=lambda job: not applies(job) or job.role(name).per_replica > 0,
            message=lambda job: (
                f"{job.role(name).key} * {RESPONSES} // replicas = {job.role(name).mini_samples:,} // "
                f"{job.role(name).data_parallel_size:,} must be at least 1"
            ),
            candidates=mini_sizes(lambda job: job.role(name)),
            found_by="run",
        ),
        Rule(
            name=f"verl.legacy_{name}_micro_divides_mini",
            keys=(key, role_key(name)),
            holds=lambda job: (
                not applies(job)
                or micro(job) is None
                or job.role(name).per_replica == 0
                or (size(job) > 0 and job.role(name).per_replica % size(job) == 0)
            ),
            message=lambda job: (
                f"a replica's mini batch, {job.role(name).mini_samples:,} // {job.role(name).data_parallel_size:,} = "
                f"{job.role(name).per_replica:,} samples, must be a multiple of its micro batch of {size(job):,}"
            ),
            candidates=lambda job: [
                factor * scale
                for scale in (1, job.role(name).data_parallel_size)
                for factor in divisors(job.role(name).per_replica, near=max(size(job), 1))
            ],
            found_by="run",
        ),
    ]


def _legacy_critic_micro(job: VerlJob) -> int | None:
    return None if job.critic_dynamic else job.critic_micro_per_gpu


RUN_RULES: list[Rule[VerlJob]] = where_usable(
    [
        *_TODAY,
        *_legacy_rules("actor", lambda job: job.micro, MICRO),
        *_legacy_rules("critic", _legacy_critic_micro, CRITIC_MICRO),
    ]
)
