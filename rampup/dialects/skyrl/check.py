"""SkyRL: the rules of its check, what it misses, and what the run then does (train/utils/utils.py, train/trainer.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rampup.config.yaml import read_mapping
from rampup.dialects.nearest import Rule
from rampup.dialects.plans import Trained, rollout_plan
from rampup.dialects.reading import read_settings
from rampup.dialects.rules import divisors, multiples, positive, violations, where_usable
from rampup.dialects.skyrl import explain as words
from rampup.dialects.skyrl import sft
from rampup.dialects.skyrl.job import (
    COUNTS,
    CRITIC_COUNTS,
    ENGINE_KEYS,
    ENTRIES,
    MODEL_SIZES,
    REF_COUNTS,
    SkyRLJob,
)
from rampup.dialects.verdict import Run, Verdict, in_words
from rampup.rl.plan import RolloutPlan

TRAIN, MICRO = "trainer.train_batch_size", "trainer.micro_train_batch_size_per_gpu"
RESPONSES, WORKERS = "generator.n_samples_per_prompt", "trainer.fully_async.num_parallel_generation_workers"


def check(path: str | Path, overrides: Sequence[str]) -> Verdict:
    """Say what a SkyRL configuration does, and whether its own check and its run take it.

    Args:
        path: a YAML file in SkyRL's keys, nested or dotted.
        overrides: `key=value` settings that win over the file; `num_prompts=N` states the size of the data set.

    Raises:
        ConfigError: unreadable, mistyped, or no file of SkyRL.
    """
    if _is_fine_tuning(path):
        return sft.check(path, overrides)
    settings = read_settings(path, overrides, ENTRIES, system="SkyRL")
    job = SkyRLJob(settings)
    found = violations(RULES, settings, SkyRLJob)
    if not job.usable:
        return Verdict(system="skyrl", violations=found)
    return Verdict(
        system="skyrl",
        violations=found,
        outcome=_outcome(job),
        derived=_derived(job),
        plan=None if found else _plan(job),
        **in_words(job, words),
    )


def _is_fine_tuning(path: str | Path) -> bool:
    """Whether a file is of the fine-tuning trainer, whose sizes stand at the top."""
    names = read_mapping(path)
    return sft.MICRO in names and not any(name.partition(".")[0] in ("trainer", "generator") for name in names)


def _plan(job: SkyRLJob) -> RolloutPlan | None:
    budget = job.settings["trainer.max_tokens_per_microbatch"] if job.by_tokens else None
    policy, *critics = [
        Trained(
            mini_batch=role.mini,
            micro=role.micro,
            tokens=budget,
            data_parallel_size=role.data_parallel_size,
            num_epochs=job.epochs,
        )
        for role in [job.role("policy"), *([job.role("critic")] if job.has_critic else [])]
    ]
    return rollout_plan(
        job.prompts,
        "prompts",
        samples_per_prompt=job.samples_per_prompt,
        policy=policy,
        critic=critics[0] if critics else None,
        pad=_outcome(job) == "pads",
    )


def _outcome(job: SkyRLJob) -> Run:
    roles = [job.role("policy"), *([job.role("critic")] if job.has_critic else [])]
    if any(role.padding for role in roles):
        return "pads"
    num_prompts = job.settings["num_prompts"]
    return "drops" if num_prompts is not None and num_prompts % job.prompts else "runs"


def _derived(job: SkyRLJob) -> dict[str, Any]:
    policy = job.role("policy")
    mini_batches = job.prompts // policy.mini
    derived: dict[str, Any] = {
        "data_parallel_size": policy.data_parallel_size,
        "samples_per_step": job.samples,
        "mini_batches": mini_batches,
        "optimizer_steps": mini_batches * job.epochs,
        "mini_batch_samples": policy.mini_samples,
        "padded_samples": policy.padding * mini_batches,
    }
    if not job.by_tokens:
        derived["accumulation_steps"] = policy.passes
    if job.has_critic:
        critic = job.role("critic")
        derived["critic_mini_batches"] = job.prompts // critic.mini
        derived["critic_optimizer_steps"] = job.prompts // critic.mini * job.epochs
        derived["critic_mini_batch_samples"] = critic.mini_samples
    if job.settings["num_prompts"] is not None:
        steps = job.settings["num_prompts"] // job.prompts * job.settings["trainer.epochs"]
        derived["training_steps"] = steps
        derived["total_optimizer_steps"] = steps * derived["optimizer_steps"]
    return derived


@dataclass(frozen=True, slots=True)
class _RoleRules:
    """The rules that the policy and the critic both have; each applies once those before it hold.

    Attributes:
        name: `policy` or `critic`.
    """

    name: str

    @property
    def key(self) -> str:
        return f"trainer.{self.name}_mini_batch_size"

    def all(self) -> list[Rule[SkyRLJob]]:
        return [*self.of_prompts(), *self.of_replicas()]

    def of_prompts(self) -> list[Rule[SkyRLJob]]:
        """The mini batch against the batch, both in prompts."""
        key = self.key
        return [
            Rule(
                name=f"skyrl.{self.name}_mini_at_most_train",
                keys=(key, TRAIN),
                holds=lambda job: not self._applies(job) or job.prompts >= job.role(self.name).mini,
                message=lambda job: (
                    f"{key}={job.role(self.name).mini:,} must be at most {TRAIN}={job.prompts:,}; both count prompts (SkyRL "
                    "stops without a message)"
                ),
                candidates=lambda job: divisors(job.prompts, near=job.role(self.name).mini),
            ),
            Rule(
                name=f"skyrl.{self.name}_mini_divides_train",
                keys=(TRAIN, key),
                holds=lambda job: not self._applies(job) or job.prompts < job.role(self.name).mini or self._divides(job),
                message=lambda job: f"{TRAIN}={job.prompts:,} must be a multiple of {key}={job.role(self.name).mini:,}",
                candidates=lambda job: multiples(job.prompts, job.role(self.name).mini),
            ),
        ]

    def of_replicas(self) -> list[Rule[SkyRLJob]]:
        """What each replica gets of a mini batch, in samples."""
        key = self.key
        return [
            Rule(
                name=f"skyrl.{self.name}_mini_reaches_every_replica",
                keys=(key, RESPONSES),
                holds=lambda job: not self._applies(job) or self._reaches(job),
                message=lambda job: (
                    f"{self._share(job)} = 0 samples a replica; each of {job.role(self.name).data_parallel_size:,} replicas "
                    "must get one"
                ),
                candidates=lambda job: [
                    *divisors(job.prompts, near=job.role(self.name).mini),
                    *multiples(job.prompts, job.role(self.name).data_parallel_size),
                ],
            ),
            Rule(
                name=f"skyrl.micro_divides_{self.name}_mini",
                keys=(MICRO, key),
                holds=lambda job: (
                    not self._reaches(job) or job.role(self.name).checked_per_replica % job.role(self.name).micro == 0
                ),
                message=lambda job: (
                    f"{self._share(job)} = {job.role(self.name).checked_per_replica:,} samples a replica must be a multiple of "
                    f"{MICRO}={job.role(self.name).micro:,}"
                ),
                candidates=lambda job: divisors(job.role(self.name).checked_per_replica, near=job.role(self.name).micro),
            ),
            Rule(
                name=f"skyrl.{self.name}_share_divides_train_share",
                keys=(TRAIN, key, RESPONSES),
                holds=lambda job: (
                    not (self._divides(job) and self._reaches(job))
                    or self._train_share(job) % job.role(self.name).checked_per_replica == 0
                ),
                message=lambda job: (
                    f"per replica, both rounded down, {TRAIN} * {RESPONSES} // {job.role(self.name).data_parallel_size:,} = "
                    f"{self._train_share(job):,} samples must be a multiple of {self._share(job)} = "
                    f"{job.role(self.name).checked_per_replica:,}"
                ),
                candidates=lambda job: multiples(
                    job.prompts,
                    job.role(self.name).mini,
                    job.role(self.name).mini * job.role(self.name).data_parallel_size,
                ),
            ),
        ]

    def _applies(self, job: SkyRLJob) -> bool:
        return self.name == "policy" or job.has_critic

    def _divides(self, job: SkyRLJob) -> bool:
        return self._applies(job) and job.prompts % job.role(self.name).mini == 0

    def _reaches(self, job: SkyRLJob) -> bool:
        return self._applies(job) and job.role(self.name).checked_per_replica > 0

    def _train_share(self, job: SkyRLJob) -> int:
        return job.samples // job.role(self.name).data_parallel_size

    def _share(self, job: SkyRLJob) -> str:
        role = job.role(self.name)
        return (
            f"{self.key} * {RESPONSES} // replicas = {role.mini:,} * {role.samples_per_prompt:,} // {role.data_parallel_size:,}"
        )


def _replicas(role: str) -> Rule[SkyRLJob]:
    """A model with fewer devices than share one sample: a division by zero."""
    key = f"trainer.{role}.sequence_parallel_size"
    return Rule(
        name=f"skyrl.{role}_has_a_replica",
        keys=(key, f"trainer.placement.{role}_num_gpus_per_node"),
        holds=lambda job: role not in job.roles or job.data_parallel_size(role) > 0 or job.splits_badly(role),
        message=lambda job: (
            f"{role}: {job.devices(role):,} devices // {job.model_size(role):,} that share a sample = 0 replicas; "
            "at least 1 is needed"
        ),
        candidates=lambda job: divisors(job.devices(role), near=job.model_size(role)),
        found_by="run" if role == "ref" else "validator",
    )


def _megatron(role: str) -> Rule[SkyRLJob]:
    return Rule(
        name=f"skyrl.megatron_divides_{role}_devices",
        keys=(f"trainer.placement.{role}_num_gpus_per_node", *(_size(role, name) for name in MODEL_SIZES)),
        holds=lambda job: not (role in job.roles and job.splits_badly(role)),
        message=lambda job: (
            f"the {role}'s {job.devices(role):,} devices must be a multiple of tensor * pipeline * context parallel size = "
            + " * ".join(f"{job.settings[_size(role, name)]:,}" for name in MODEL_SIZES)
            + f" = {job.model_size(role):,}"
        ),
        candidates=lambda job: range(1, 129),
    )


def _size(role: str, name: str) -> str:
    return f"trainer.{role}.megatron_config.{name}_parallel_size"


def _colocated(role: str) -> Rule[SkyRLJob]:
    """Models that share devices must have equally many; only where the file says how many (train/trainer.py)."""
    keys = tuple(f"trainer.placement.{role}_num_{what}" for what in ("gpus_per_node", "nodes"))
    return Rule(
        name=f"skyrl.colocated_{role}_devices",
        keys=keys,
        holds=lambda job: (
            role not in job.roles
            or not job.settings["trainer.placement.colocate_all"]
            or not job.settings.given & set(keys)
            or job.devices(role) == job.devices("policy")
        ),
        message=lambda job: (
            f"with trainer.placement.colocate_all the {role} must have as many devices as the policy: "
            f"{job.devices(role):,} is not {job.devices('policy'):,}"
        ),
        candidates=lambda job: divisors(job.devices("policy")),
        found_by="run",
    )


def _sequence_parallel(role: str) -> Rule[SkyRLJob]:
    key = f"trainer.{role}.sequence_parallel_size"
    return Rule(
        name=f"skyrl.megatron_{role}_sequence_parallel",
        keys=(key,),
        holds=lambda job: not job.megatron or job.settings[key] == 1,
        message=lambda job: f"{key}={job.settings[key]:,} must be 1 with trainer.strategy=megatron",
        candidates=lambda job: [1],
    )


def _asynchronous(job: SkyRLJob) -> bool:
    return bool(job.settings["trainer.fully_async.enabled"])


def _workers_fit(job: SkyRLJob) -> bool:
    mini = job.role("policy").mini
    most = mini * (job.settings["trainer.fully_async.max_staleness_steps"] + 1)
    return bool(mini <= job.settings[WORKERS] <= most)


_STEP: list[Rule[SkyRLJob]] = [
    Rule(
        name="skyrl.samples_reach_every_replica",
        keys=(TRAIN, RESPONSES),
        holds=lambda job: job.samples >= job.lcm_checked,
        message=lambda job: (
            f"{TRAIN} * {RESPONSES} = {job.prompts:,} * {job.samples_per_prompt:,} = {job.samples:,} samples must be at "
            f"least {job.lcm_checked:,}, the least common multiple of the policy's and the reference's replicas"
        ),
        candidates=lambda job: multiples(job.prompts, job.prompt_stride, job.role("policy").mini),
    ),
    Rule(
        name="skyrl.no_tail_is_cut",
        keys=(TRAIN, RESPONSES),
        holds=lambda job: job.prompts % job.prompt_stride == 0,
        message=lambda job: (
            f"{TRAIN}={job.prompts:,} must be a multiple of {job.prompt_stride:,}, the prompts whose "
            f"{job.samples_per_prompt:,} responses each fill every replica of every model "
            f"({', '.join(f'{size:,}' for size in job.data_parallel_sizes)}); the run keeps "
            f"{job.prompts // job.prompt_stride * job.prompt_stride:,} prompts and stops in its first step, because their "
            "number is not the one asked for. SkyRL's own check does not see it"
        ),
        candidates=lambda job: multiples(job.prompts, job.prompt_stride, job.prompt_stride * job.role("policy").mini),
        found_by="run",
    ),
    Rule(
        name="skyrl.engines_fill_the_devices",
        keys=(ENGINE_KEYS[0], *ENGINE_KEYS[1:]),
        holds=lambda job: (
            not job.settings["trainer.placement.colocate_all"] or job.engine_devices in (None, job.devices("policy"))
        ),
        message=lambda job: (
            "with trainer.placement.colocate_all the engines' devices, engines * tensor * pipeline * data parallel size = "
            f"{job.engine_devices:,}, must equal the policy's {job.devices('policy'):,}"
        ),
        candidates=lambda job: divisors(job.devices("policy")),
    ),
    Rule(
        name="skyrl.data_set_fills_a_step",
        keys=("num_prompts", TRAIN),
        holds=lambda job: job.settings["num_prompts"] is None or job.settings["num_prompts"] >= job.prompts,
        message=lambda job: f"a data set of {job.settings['num_prompts']:,} prompts must hold {TRAIN}={job.prompts:,}",
        candidates=lambda job: [job.prompts],
    ),
    Rule(
        name="skyrl.async_step_is_one_mini_batch",
        keys=(TRAIN, "trainer.policy_mini_batch_size"),
        holds=lambda job: not _asynchronous(job) or job.prompts == job.role("policy").mini,
        message=lambda job: (
            f"fully asynchronous training needs {TRAIN}={job.prompts:,} equal to "
            f"trainer.policy_mini_batch_size={job.role('policy').mini:,}"
        ),
        candidates=lambda job: [job.role("policy").mini],
    ),
    Rule(
        name="skyrl.async_workers",
        keys=(WORKERS, "trainer.fully_async.max_staleness_steps"),
        holds=lambda job: not _asynchronous(job) or _workers_fit(job),
        message=lambda job: (
            f"{WORKERS}={job.settings[WORKERS]:,} must lie between trainer.policy_mini_batch_size="
            f"{job.role('policy').mini:,} and that times (max_staleness_steps + 1) = "
            f"{job.role('policy').mini * (job.settings['trainer.fully_async.max_staleness_steps'] + 1):,}"
        ),
        candidates=lambda job: [
            job.role("policy").mini,
            job.role("policy").mini * (job.settings["trainer.fully_async.max_staleness_steps"] + 1),
        ],
    ),
    Rule(
        name="skyrl.megatron_has_no_critic",
        keys=("trainer.strategy", "trainer.critic.model.path"),
        holds=lambda job: not (job.megatron and job.has_critic),
        message=lambda job: "trainer.strategy=megatron trains no critic: trainer.critic.model.path must be null",
        candidates=lambda job: ["fsdp"],
    ),
    *map(_sequence_parallel, ("policy", "ref")),
]

RULES: list[Rule[SkyRLJob]] = [
    *[positive("skyrl", key, found_by="validator", why="SkyRL's check divides by it or compares it with 0") for key in COUNTS],
    *[
        positive("skyrl", key, found_by="validator", why="the critic needs it", applies=lambda job: job.has_critic)
        for key in CRITIC_COUNTS
    ],
    *[
        positive("skyrl", key, found_by="run", why="the reference model needs it", applies=lambda job: job.has_ref)
        for key in REF_COUNTS
    ],
    *[
        positive("skyrl", key, found_by="run", why="nothing would be trained or evaluated")
        for key in ("trainer.update_epochs_per_batch", "trainer.epochs", "trainer.eval_batch_size", "num_prompts")
    ],
    *[_megatron(role) for role in ("policy", "ref")],
    *[_replicas(role) for role in ("policy", "critic", "ref")],
    *where_usable([*_RoleRules("policy").all(), *_RoleRules("critic").all(), *_STEP, *map(_colocated, ("critic", "ref"))]),
]
