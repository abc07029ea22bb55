"""SkyRL: the numbers that follow from a file, the rules of its check, and what only the run finds.

Sources: SkyRL `train/utils/utils.py`, `train/trainer.py`, `distributed/dispatch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from rampup.dialects.convert import rollout_plan, training
from rampup.dialects.reading import Settings, read_settings
from rampup.dialects.rules import Dialect, Job, Rule, Term, if_usable, multiple, positive, value_of
from rampup.dialects.skyrl import (
    ENGINE_KEYS,
    FORWARD,
    KEYS,
    MICRO,
    MINI,
    OLD_ENGINE_KEYS,
    RESPONSES,
    TRAIN,
    WORKERS,
    device_keys,
    explain,
    megatron_keys,
    sft,
)
from rampup.dialects.verdict import Run
from rampup.rl.plan import RolloutPlan

COUNTS = (TRAIN, MINI, MICRO, FORWARD, RESPONSES)
MODEL_COUNTS = {
    model: (*device_keys(model)[::-1], f"trainer.{model}.sequence_parallel_size") for model in ("policy", "critic", "ref")
}
MODEL_COUNTS["policy"] += megatron_keys("policy")
MODEL_COUNTS["ref"] += megatron_keys("ref")
MODEL_COUNTS["critic"] = ("trainer.critic_mini_batch_size", *MODEL_COUNTS["critic"])


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers of a trained model: the policy or the critic.

    Attributes:
        name: `policy` or `critic`.
        mini: prompts of an update.
        mini_samples: samples of an update, whole job.
        replicas: data-parallel size.
        checked_share: samples of an update and replica, rounded down, as SkyRL's check computes them.
        padding: empty samples that the run adds to each mini batch.
        share: samples of an update and replica in the run.
        micro: samples of a pass.
        passes: forward and backward passes per update and replica; the last may be smaller.
    """

    name: str
    mini: int
    mini_samples: int
    replicas: int
    checked_share: int
    padding: int
    share: int
    micro: int
    passes: int

    @property
    def key(self) -> str:
        """The key of the mini batch."""
        return f"trainer.{self.name}_mini_batch_size"


class SkyRLJob(Job):
    """A SkyRL file's numbers, by SkyRL's own formulas."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.prompts: int = self[TRAIN]
        self.samples_per_prompt: int = self[RESPONSES]
        self.samples = self.prompts * self.samples_per_prompt
        self.epochs: int = self["trainer.update_epochs_per_batch"]
        self.by_tokens: bool = self["trainer.max_tokens_per_microbatch"] > 0  # the number of passes then depends on lengths
        self.megatron: bool = self["trainer.strategy"] == "megatron"
        self.has_critic: bool = self["trainer.critic.model.path"] is not None
        self.has_ref: bool = self["trainer.algorithm.use_kl_loss"] or self["trainer.algorithm.use_kl_in_reward"]
        self.models = ("policy", *(["critic"] if self.has_critic else []), *(["ref"] if self.has_ref else []))

        # Devices that share a sample, and replicas, rounded down. The critic never has Megatron's sizes.
        self.devices = {model: math.prod(self[key] for key in device_keys(model)) for model in MODEL_COUNTS}
        self.model_sizes = {
            model: math.prod(self[key] for key in megatron_keys(model))
            if self.megatron and model != "critic"
            else self[f"trainer.{model}.sequence_parallel_size"]
            for model in MODEL_COUNTS
        }
        self.replicas = {model: self.devices[model] // max(self.model_sizes[model], 1) for model in MODEL_COUNTS}
        # Models that take part and whose devices Megatron's sizes do not divide.
        self.uneven = [
            model
            for model in self.models
            if self.megatron and model != "critic" and self.devices[model] % max(self.model_sizes[model], 1)
        ]
        counts = [*COUNTS, *(key for model in self.models for key in MODEL_COUNTS[model])]
        self.usable = (
            all(self[key] >= 1 for key in counts) and all(self.replicas[model] for model in self.models) and not self.uneven
        )
        if not self.usable:
            return

        self.trained = [self._model(name) for name in self.models if name != "ref"]
        self.policy = self.trained[0]
        self.critic = self.trained[1] if self.has_critic else None
        # SkyRL's check looks at the policy and the reference; every model must get full samples from the run.
        self.lcm_checked = math.lcm(self.replicas["policy"], *([self.replicas["ref"]] if self.has_ref else []))
        common = math.lcm(*(self.replicas[model] for model in self.models))
        self.prompt_stride = common // math.gcd(common, self.samples_per_prompt)
        self.mini_batches = self.prompts // self.policy.mini
        self.engine_devices: int | None = None
        if settings.given & {*ENGINE_KEYS, *OLD_ENGINE_KEYS}:
            pairs = zip(ENGINE_KEYS, OLD_ENGINE_KEYS, strict=True)
            self.engine_devices = math.prod(self[new] if self[old] is None else self[old] for new, old in pairs)

    def _model(self, name: str) -> Model:
        mini, replicas, micro = self[f"trainer.{name}_mini_batch_size"], self.replicas[name], self[MICRO]
        samples = mini * self.samples_per_prompt
        share = -(-samples // replicas)
        return Model(
            name=name,
            mini=mini,
            mini_samples=samples,
            replicas=replicas,
            checked_share=samples // replicas,
            padding=-samples % replicas,
            share=share,
            micro=micro,
            passes=-(-share // micro),
        )

    @property
    def outcome(self) -> Run:
        """Mini batches are padded to the replicas; the last, incomplete step of the data set is dropped."""
        if any(model.padding for model in self.trained):
            return "pads"
        return "drops" if self["num_prompts"] is not None and self["num_prompts"] % self.prompts else "runs"

    def derived(self) -> dict[str, Any]:
        """Return the numbers of the report."""
        derived: dict[str, Any] = {
            "data_parallel_size": self.policy.replicas,
            "samples_per_step": self.samples,
            "mini_batches": self.mini_batches,
            "optimizer_steps": self.mini_batches * self.epochs,
            "mini_batch_samples": self.policy.mini_samples,
            "padded_samples": self.policy.padding * self.mini_batches,
        }
        if not self.by_tokens:
            derived["accumulation_steps"] = self.policy.passes
        if self.critic is not None:
            derived["critic_mini_batches"] = self.prompts // self.critic.mini
            derived["critic_optimizer_steps"] = self.prompts // self.critic.mini * self.epochs
            derived["critic_mini_batch_samples"] = self.critic.mini_samples
        if self["num_prompts"] is not None:
            derived["training_steps"] = self["num_prompts"] // self.prompts * self["trainer.epochs"]
            derived["total_optimizer_steps"] = derived["training_steps"] * derived["optimizer_steps"]
        return derived

    def plan(self) -> RolloutPlan | None:
        """Return the plan of one training step."""
        tokens = self["trainer.max_tokens_per_microbatch"] if self.by_tokens else None
        policy, *critics = [
            training(
                "prompts", mini_batch=model.mini, micro=model.micro, tokens=tokens, replicas=model.replicas, epochs=self.epochs
            )
            for model in self.trained
        ]
        return rollout_plan(
            self.prompts,
            "prompts",
            samples_per_prompt=self.samples_per_prompt,
            policy=policy,
            critic=critics[0] if critics else None,
            pad=self.outcome == "pads",
        )


def _device_rules(model: str) -> list[Rule[SkyRLJob]]:
    """Return the rules that a model's devices hold at least one replica, and only full ones with Megatron."""
    per_node, sequence = device_keys(model)[0], f"trainer.{model}.sequence_parallel_size"
    has_a_replica = Rule[SkyRLJob](
        name=f"skyrl.{model}_has_a_replica",
        keys=(sequence, per_node),
        when=lambda job: model in job.models and model not in job.uneven,
        holds=lambda job: job.replicas[model] > 0,
        message=lambda job: (
            f"{model}: {job.devices[model]:,} devices // {job.model_sizes[model]:,} that share a sample = 0 replicas; at least "
            "1 is needed"
        ),
        division=lambda job: (job.devices[model], job.model_sizes[model]),
        found_by="run" if model == "ref" else "validator",
    )
    if model == "critic":
        return [has_a_replica]
    divides = Rule[SkyRLJob](
        name=f"skyrl.megatron_divides_{model}_devices",
        keys=(per_node, *megatron_keys(model)),
        holds=lambda job: model not in job.uneven,
        message=lambda job: (
            f"the {model}'s {job.devices[model]:,} devices must be a multiple of tensor * pipeline * context parallel size = "
            + " * ".join(f"{job[key]:,}" for key in megatron_keys(model))
            + f" = {job.model_sizes[model]:,}"
        ),
        division=lambda job: (job.devices[model], job.model_sizes[model]),
    )
    return [divides, has_a_replica]


def _mini_batch_rules(number: int, name: str) -> list[Rule[SkyRLJob]]:
    """Return the rules of the mini batch of the policy (0) or the critic (1). Each applies if those before it hold."""
    key = f"trainer.{name}_mini_batch_size"

    def model(job: SkyRLJob) -> Model:
        return job.trained[number]

    def applies(job: SkyRLJob) -> bool:
        return len(job.trained) > number

    def reaches(job: SkyRLJob) -> bool:
        return applies(job) and model(job).checked_share > 0

    def share(job: SkyRLJob) -> Term:
        own = model(job)
        text = f"{key} * {RESPONSES} // replicas = {own.mini:,} * {job.samples_per_prompt:,} // {own.replicas:,}"
        return Term(f"{text} = {own.checked_share:,} samples per replica", own.checked_share)

    def step_share(job: SkyRLJob) -> Term:
        number = job.samples // model(job).replicas
        return Term(f"{TRAIN} * {RESPONSES} // {model(job).replicas:,} = {number:,} samples per replica (rounded down)", number)

    return [
        Rule(
            name=f"skyrl.{name}_mini_at_most_train",
            keys=(key, TRAIN),
            when=applies,
            holds=lambda job: job.prompts >= model(job).mini,
            message=lambda job: (
                f"{key}={model(job).mini:,} must be at most {TRAIN}={job.prompts:,}; both count prompts (SkyRL stops without "
                "a message)"
            ),
            division=lambda job: (job.prompts, model(job).mini),
        ),
        multiple(
            f"skyrl.{name}_mini_divides_train",
            (TRAIN, key),
            value_of(TRAIN),
            value_of(key),
            when=lambda job: applies(job) and job.prompts >= model(job).mini,
        ),
        Rule(
            name=f"skyrl.{name}_mini_reaches_every_replica",
            keys=(key, RESPONSES),
            when=applies,
            holds=reaches,
            message=lambda job: f"{share(job).text}; each of {model(job).replicas:,} replicas must get at least one",
            division=lambda job: (job.prompts, model(job).replicas),
        ),
        multiple(f"skyrl.micro_divides_{name}_mini", (MICRO, key), share, value_of(MICRO), when=reaches),
        multiple(
            f"skyrl.{name}_share_divides_train_share",
            (TRAIN, key, RESPONSES),
            step_share,
            share,
            when=lambda job: reaches(job) and job.prompts % model(job).mini == 0,
        ),
    ]


def _colocated(model: str) -> Rule[SkyRLJob]:
    """Return the rule that models on shared devices have equally many; it applies only if the file says how many."""
    keys = device_keys(model)
    return Rule(
        name=f"skyrl.colocated_{model}_devices",
        keys=keys,
        when=lambda job: model in job.models and job["trainer.placement.colocate_all"] and bool(job.settings.given & set(keys)),
        holds=lambda job: job.devices[model] == job.devices["policy"],
        message=lambda job: (
            f"with trainer.placement.colocate_all the {model} must have as many devices as the policy: "
            f"{job.devices[model]:,} is not {job.devices['policy']:,}"
        ),
        division=lambda job: (job.devices["policy"], job.devices[model]),
        found_by="run",
    )


def _sequence_parallel(model: str) -> Rule[SkyRLJob]:
    key = f"trainer.{model}.sequence_parallel_size"
    return Rule(
        name=f"skyrl.megatron_{model}_sequence_parallel",
        keys=(key,),
        when=lambda job: job.megatron,
        holds=lambda job: job[key] == 1,
        message=lambda job: f"{key}={job[key]:,} must be 1 with trainer.strategy=megatron",
    )


def _asynchronous(job: SkyRLJob) -> bool:
    return bool(job["trainer.fully_async.enabled"])


def _max_workers(job: SkyRLJob) -> int:
    return int(job.policy.mini * (job["trainer.fully_async.max_staleness_steps"] + 1))


_STEP: list[Rule[SkyRLJob]] = [
    Rule(
        name="skyrl.samples_reach_every_replica",
        keys=(TRAIN, RESPONSES),
        holds=lambda job: job.samples >= job.lcm_checked,
        message=lambda job: (
            f"{TRAIN} * {RESPONSES} = {job.prompts:,} * {job.samples_per_prompt:,} = {job.samples:,} samples must be at "
            f"least {job.lcm_checked:,}, the least common multiple of the policy's and the reference's replicas"
        ),
        division=lambda job: (job.samples, job.lcm_checked),
    ),
    multiple(
        "skyrl.no_tail_is_cut",
        (TRAIN, RESPONSES),
        value_of(TRAIN),
        lambda job: Term(f"{job.prompt_stride:,}", job.prompt_stride),
        note=lambda job: (
            f", the prompts whose {job.samples_per_prompt:,} responses each fill every replica of every model "
            f"({', '.join(f'{job.replicas[model]:,}' for model in job.models)}); the run keeps "
            f"{job.prompts // job.prompt_stride * job.prompt_stride:,} prompts and stops in its first step, because their "
            "number is not the requested one. SkyRL's own check does not notice it"
        ),
        found_by="run",
    ),
    Rule(
        name="skyrl.engines_fill_the_devices",
        keys=ENGINE_KEYS,
        when=lambda job: job["trainer.placement.colocate_all"] and job.engine_devices is not None,
        holds=lambda job: job.engine_devices == job.devices["policy"],
        message=lambda job: (
            "with trainer.placement.colocate_all the engines' devices, engines * tensor * pipeline * data parallel size = "
            f"{job.engine_devices:,}, must equal the policy's {job.devices['policy']:,}"
        ),
        division=lambda job: (job.devices["policy"], 1),
    ),
    Rule(
        name="skyrl.data_set_fills_a_step",
        keys=("num_prompts", TRAIN),
        when=lambda job: job["num_prompts"] is not None,
        holds=lambda job: job["num_prompts"] >= job.prompts,
        message=lambda job: f"a data set of {job['num_prompts']:,} prompts must contain at least {TRAIN}={job.prompts:,}",
        division=lambda job: (job["num_prompts"], job.prompts),
    ),
    Rule(
        name="skyrl.async_step_is_one_mini_batch",
        keys=(TRAIN, MINI),
        when=_asynchronous,
        holds=lambda job: job.prompts == job.policy.mini,
        message=lambda job: f"fully asynchronous training needs {TRAIN}={job.prompts:,} equal to {MINI}={job.policy.mini:,}",
        division=lambda job: (job.prompts, job.policy.mini),
    ),
    Rule(
        name="skyrl.async_workers",
        keys=(WORKERS, "trainer.fully_async.max_staleness_steps"),
        when=_asynchronous,
        holds=lambda job: job.policy.mini <= job[WORKERS] <= _max_workers(job),
        message=lambda job: (
            f"{WORKERS}={job[WORKERS]:,} must be between {MINI}={job.policy.mini:,} and that times (max_staleness_steps + 1) "
            f"= {_max_workers(job):,}"
        ),
        division=lambda job: (_max_workers(job), job.policy.mini),
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
    *positive("skyrl", [*COUNTS, *MODEL_COUNTS["policy"]], why="SkyRL's check divides by it or compares it with 0"),
    *positive("skyrl", MODEL_COUNTS["critic"], why="the critic needs it", when=lambda job: job.has_critic),
    *positive("skyrl", MODEL_COUNTS["ref"], why="the reference model needs it", found_by="run", when=lambda job: job.has_ref),
    *positive(
        "skyrl",
        ["trainer.update_epochs_per_batch", "trainer.epochs", "trainer.eval_batch_size", "num_prompts"],
        why="nothing would be trained or evaluated",
        found_by="run",
    ),
    *[rule for model in MODEL_COUNTS for rule in _device_rules(model)],
    *if_usable([*_mini_batch_rules(0, "policy"), *_mini_batch_rules(1, "critic"), *_STEP, *map(_colocated, ("critic", "ref"))]),
]
DIALECT = Dialect(
    read=partial(read_settings, entries=KEYS, system="SkyRL"),
    keys=KEYS,
    job=SkyRLJob,
    rules=RULES,
    words=explain,
    variant=lambda path: sft.DIALECT if sft.is_fine_tuning(path) else None,
)
