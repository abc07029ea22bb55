"""SkyRL: the numbers that follow from a file, the rules of its check, and what only the run finds.

Sources: SkyRL `train/utils/utils.py`, `train/trainer.py`, `distributed/dispatch.py`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from rampup.dialects import skyrl as keys
from rampup.dialects.convert import TrainedModel, rollout_plan
from rampup.dialects.reading import Settings, read_settings
from rampup.dialects.rules import (
    Dialect,
    Job,
    Rule,
    Side,
    Term,
    at_least,
    constant,
    equal,
    found_by_run,
    if_usable,
    multiple,
    positive,
    product,
)
from rampup.dialects.skyrl import ENGINE_KEYS, MICRO, MINI, RESPONSES, TRAIN, WORKERS, device_keys, explain, megatron_keys, sft
from rampup.dialects.verdict import Run
from rampup.rl.plan import RolloutPlan

COUNTS = (TRAIN, MINI, MICRO, keys.FORWARD, RESPONSES)
MODEL_COUNTS = {
    model: (*device_keys(model)[::-1], f"trainer.{model}.sequence_parallel_size") for model in ("policy", "critic", "ref")
}
MODEL_COUNTS["policy"] += megatron_keys("policy")
MODEL_COUNTS["ref"] += megatron_keys("ref")
MODEL_COUNTS["critic"] = ("trainer.critic_mini_batch_size", *MODEL_COUNTS["critic"])


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
        self.mini_batches = self.prompts // self.policy.mini_batch
        self.engine_devices: int | None = None
        if settings.given & {*ENGINE_KEYS, *keys.OLD_ENGINE_KEYS}:
            pairs = zip(ENGINE_KEYS, keys.OLD_ENGINE_KEYS, strict=True)
            self.engine_devices = math.prod(self[new] if self[old] is None else self[old] for new, old in pairs)

    def _model(self, name: str) -> TrainedModel:
        mini = self[f"trainer.{name}_mini_batch_size"]
        return TrainedModel(
            name=name,
            mini_batch=mini,
            mini_samples=mini * self.samples_per_prompt,
            replicas=self.replicas[name],
            micro=self[MICRO],
            tokens=self["trainer.max_tokens_per_microbatch"] if self.by_tokens else None,
            epochs=self.epochs,
        )

    def passes(self, model: TrainedModel) -> int:
        """Return the forward and backward passes per update and replica; the last may be smaller."""
        return -(-model.padded_share // int(self[MICRO]))

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
            derived["accumulation_steps"] = self.passes(self.policy)
        if self.critic is not None:
            derived["critic_mini_batches"] = self.prompts // self.critic.mini_batch
            derived["critic_optimizer_steps"] = self.prompts // self.critic.mini_batch * self.epochs
            derived["critic_mini_batch_samples"] = self.critic.mini_samples
        if self["num_prompts"] is not None:
            derived["training_steps"] = self["num_prompts"] // self.prompts * self["trainer.epochs"]
            derived["total_optimizer_steps"] = derived["training_steps"] * derived["optimizer_steps"]
        return derived

    def plan(self) -> RolloutPlan:
        """Return the plan of one training step."""
        pad = self.outcome == "pads"
        return rollout_plan(self.prompts, "prompts", self.trained, samples_per_prompt=self.samples_per_prompt, pad=pad)


def _device_rules(model: str) -> list[Rule[SkyRLJob]]:
    """Return the rules that Megatron's sizes divide a model's devices, and that there is at least one replica."""
    per_node, sequence = device_keys(model)[0], f"trainer.{model}.sequence_parallel_size"

    devices: Side[SkyRLJob] = (f"the {model}'s {{:,}} devices", lambda job: job.devices[model])

    def megatron_size(job: SkyRLJob) -> Term:
        sizes = " * ".join(f"{job[key]:,}" for key in megatron_keys(model))
        size = job.model_sizes[model]
        return Term(f"tensor * pipeline * context parallel size = {sizes} = {size:,}", size)

    has_a_replica = at_least(
        f"skyrl.{model}_has_a_replica",
        (sequence, per_node),
        devices,
        ("the {:,} that share a sample", lambda job: job.model_sizes[model]),
        when=lambda job: model in job.models and model not in job.uneven,
        note=": there is no replica",
        found_by="run" if model == "ref" else "validator",
    )
    if model == "critic":
        return [has_a_replica]
    return [
        multiple(
            f"skyrl.megatron_divides_{model}_devices",
            (per_node, *megatron_keys(model)),
            devices,
            megatron_size,
            when=lambda job: job.megatron and model in job.models,
        ),
        has_a_replica,
    ]


def _mini_batch_rules(number: int, name: str) -> list[Rule[SkyRLJob]]:
    """Return the rules of the mini batch of the policy (0) or the critic (1). Each applies if those before it hold."""
    key = f"trainer.{name}_mini_batch_size"

    def applies(job: SkyRLJob) -> bool:
        return len(job.trained) > number

    def fits(job: SkyRLJob) -> bool:
        return applies(job) and job.prompts >= job[key]

    def reaches(job: SkyRLJob) -> bool:
        return applies(job) and job.trained[number].share > 0

    replicas: Side[SkyRLJob] = ("the {:,} replicas", lambda job: job.trained[number].replicas)

    def samples(job: SkyRLJob) -> Term:
        return product({key: job[key], RESPONSES: job.samples_per_prompt}, "samples")

    def share(job: SkyRLJob) -> Term:
        size = job.trained[number].share
        return Term(f"{samples(job).text} // {job.trained[number].replicas:,} replicas = {size:,} samples per replica", size)

    def step_share(job: SkyRLJob) -> Term:
        size = job.samples // job.trained[number].replicas
        return Term(f"{job.samples:,} samples // {job.trained[number].replicas:,} replicas = {size:,} samples", size)

    return [
        at_least(f"skyrl.{name}_mini_at_most_train", (key, TRAIN), TRAIN, key, when=applies, note="; both count prompts"),
        multiple(f"skyrl.{name}_mini_divides_train", (TRAIN, key), TRAIN, key, when=fits),
        at_least(f"skyrl.{name}_mini_reaches_every_replica", (key, RESPONSES), samples, replicas, when=applies),
        multiple(f"skyrl.micro_divides_{name}_mini", (MICRO, key), share, MICRO, when=reaches),
        multiple(
            f"skyrl.{name}_share_divides_train_share",
            (TRAIN, key, RESPONSES),
            step_share,
            share,
            when=lambda job: reaches(job) and job.prompts % job[key] == 0,
        ),
    ]


_POLICY_DEVICES: Side[SkyRLJob] = ("the policy's {:,} devices", lambda job: job.devices["policy"])


def _colocated(model: str) -> Rule[SkyRLJob]:
    """Return the rule that models on shared devices have equally many; it applies only if the file says how many."""
    own = device_keys(model)
    return equal(
        f"skyrl.colocated_{model}_devices",
        own,
        (f"the {model}'s {{:,}} devices", lambda job: job.devices[model]),
        _POLICY_DEVICES,
        when=lambda job: model in job.models and job["trainer.placement.colocate_all"] and bool(job.settings.given & set(own)),
        note=" with trainer.placement.colocate_all",
        found_by="run",
    )


def _sequence_parallel(model: str) -> Rule[SkyRLJob]:
    key = f"trainer.{model}.sequence_parallel_size"
    note = " with trainer.strategy=megatron"
    return equal(
        f"skyrl.megatron_{model}_sequence_parallel", (key,), key, constant(1), when=lambda job: job.megatron, note=note
    )


def _asynchronous(job: SkyRLJob) -> bool:
    return bool(job["trainer.fully_async.enabled"])


def _max_workers(job: SkyRLJob) -> int:
    return int(job.policy.mini_batch * (job["trainer.fully_async.max_staleness_steps"] + 1))


_STEP: list[Rule[SkyRLJob]] = [
    at_least("skyrl.samples_reach_every_replica", (TRAIN, RESPONSES),
        lambda job: product({TRAIN: job.prompts, RESPONSES: job.samples_per_prompt}, "samples"),
        ("{:,}", lambda job: job.lcm_checked),
        note=", the least common multiple of the policy's and the reference's replicas"),
    multiple("skyrl.no_tail_is_cut", (TRAIN, RESPONSES), TRAIN, ("{:,}", lambda job: job.prompt_stride),
        note=lambda job: (
            f", the prompts whose {job.samples_per_prompt:,} responses each fill every replica of every model "
            f"({', '.join(f'{job.replicas[model]:,}' for model in job.models)}); the run keeps "
            f"{job.prompts // job.prompt_stride * job.prompt_stride:,} prompts and stops in its first step, because their "
            "number is not the requested one. SkyRL's own check does not notice it"),
        found_by="run"),
    equal("skyrl.engines_fill_the_devices", ENGINE_KEYS,
        lambda job: Term(
            f"the engines' devices, engines * tensor * pipeline * data parallel size = {job.engine_devices:,},",
            job.engine_devices or 0),
        _POLICY_DEVICES, when=lambda job: job["trainer.placement.colocate_all"] and job.engine_devices is not None,
        note=" with trainer.placement.colocate_all"),
    at_least("skyrl.data_set_fills_a_step", ("num_prompts", TRAIN),
        ("a data set of {:,} prompts", lambda job: job["num_prompts"]), TRAIN,
        when=lambda job: job["num_prompts"] is not None),
    equal("skyrl.async_step_is_one_mini_batch", (TRAIN, MINI), TRAIN, MINI, when=_asynchronous,
        note=" in fully asynchronous training"),
    Rule(name="skyrl.async_workers", keys=(WORKERS, "trainer.fully_async.max_staleness_steps"), when=_asynchronous,
        holds=lambda job: job.policy.mini_batch <= job[WORKERS] <= _max_workers(job),
        message=lambda job: (
            f"{WORKERS}={job[WORKERS]:,} must be between {MINI}={job.policy.mini_batch:,} and that times "
            f"(max_staleness_steps + 1) = {_max_workers(job):,}"),
        division=lambda job: (_max_workers(job), job.policy.mini_batch)),
    Rule(name="skyrl.megatron_has_no_critic", keys=("trainer.strategy", "trainer.critic.model.path"),
        holds=lambda job: not (job.megatron and job.has_critic),
        message=lambda job: "trainer.strategy=megatron trains no critic: trainer.critic.model.path must be null",
        candidates=lambda job: ["fsdp"]),
    *map(_sequence_parallel, ("policy", "ref")),
]  # fmt: skip
_TRAINED = ["trainer.update_epochs_per_batch", "trainer.epochs", "trainer.eval_batch_size", "num_prompts"]
RULES: list[Rule[SkyRLJob]] = [
    *positive("skyrl", [*COUNTS, *MODEL_COUNTS["policy"]], "SkyRL's check divides by it or compares it with 0"),
    *positive("skyrl", MODEL_COUNTS["critic"], "the critic needs it", when=lambda job: job.has_critic),
    *found_by_run(positive("skyrl", MODEL_COUNTS["ref"], "the reference model needs it", when=lambda job: job.has_ref)),
    *found_by_run(positive("skyrl", _TRAINED, "nothing would be trained or evaluated")),
    *[rule for model in MODEL_COUNTS for rule in _device_rules(model)],
    *if_usable([*_mini_batch_rules(0, "policy"), *_mini_batch_rules(1, "critic"), *_STEP, *map(_colocated, ("critic", "ref"))]),
]
DIALECT = Dialect(
    read=partial(read_settings, entries=keys.KEYS, system="SkyRL"),
    keys=keys.KEYS,
    job=SkyRLJob,
    rules=RULES,
    words=explain,
    variant=lambda path: sft.DIALECT if sft.is_fine_tuning(path) else None,
)
