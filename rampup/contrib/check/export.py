"""A rollout or a pre-training plan in the keys of another system: `rampup plan FILE
--export SYSTEM`.

Each system is one function, which refuses what the system cannot express. What `rampup
check` can read is then checked by the rules of its dialect, and the numbers that the
dialect finds must be those of the plan.
"""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from rampup.config.schema import Config
from rampup.config.stages import mesh_axes
from rampup.contrib.check import load_dialect
from rampup.contrib.check.maxtext import MaxTextJob
from rampup.contrib.check.megatron import MegatronJob
from rampup.contrib.check.rules import Job, find_violations
from rampup.contrib.rl.config import RolloutConfig
from rampup.contrib.rl.plan import RolloutPlan, Updates
from rampup.errors import ConfigError, choice_error
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.numbers import AUTO, to_yaml_number
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp, Phase

MAX_DEVICES_PER_NODE = 8
_STEP = ("mini_batches", "mini_batch_samples", "optimizer_steps")
_SHARED = (
    "data_parallel_size",
    "samples_per_step",
    *_STEP,
    "accumulation_steps",
    *(f"critic_{name}" for name in _STEP),
)
# The systems' names of the values of rl.loss_agg_mode that they know.
_LOSSES = {
    "maxtext_rl": {
        "token-mean": "token-mean",
        "seq-mean-token-mean": "sequence-mean-token-mean",
    },
    "skyrl": {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
    "verl": {
        "token-mean": "token-mean",
        "seq-mean-token-sum": "seq-mean-token-sum",
        "seq-mean-token-mean": "seq-mean-token-mean",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A rollout or a run in another system's keys."""

    values: Mapping[str, Any]  # by dotted key
    facts: Mapping[str, Any] = field(
        default_factory=dict
    )  # what the system takes elsewhere, as `rampup check` does
    notes: tuple[
        str, ...
    ] = ()  # what the system does otherwise than the plan, or needs in addition

    def to_yaml(self, system: str) -> str:
        """Return the text of the file, with the notes as comments."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            place, (*groups, name) = tree, key.split(".")
            for group in groups:
                place = place.setdefault(group, {})
            place[name] = value
        facts = "".join(f" {key}={value}" for key, value in self.facts.items())
        lines = (
            f"The sizes for {NAMES[system]}, as rampup planned them.",
            f"Check: rampup check FILE --from {system}{facts}",
            *self.notes,
        )
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(
            tree, sort_keys=False, default_flow_style=False
        )


def export_rollout(
    config: RolloutConfig, plan: RolloutPlan, num_devices: int, system: str
) -> Exported:
    """Return a rollout's batches in the keys of one of `EXPORTS`, checked by its rules,
    or refuse what it cannot run.
    """
    if system not in EXPORTS:
        raise choice_error("export", system, list(EXPORTS))
    rollout = _Rollout(
        system=system,
        config=config,
        plan=plan,
        axes=mesh_axes(config, num_devices),
        num_devices=num_devices,
    )
    rollout.require(
        config.batch_size_schedule is None,
        "rl.batch_size_schedule",
        "its batch cannot grow; set it to null",
    )
    rollout.require(
        config.zero_spread_groups == "keep",
        "zero_spread_groups",
        "only steps of the planned prompts are exported; set it to keep",
    )
    exported = EXPORTS[system](rollout)
    # The numbers that the exported file must have, by the names that all systems share.
    numbers = {
        "samples_per_step": plan.samples_per_step,
        **plan.policy_updates.to_dict(),
    }
    if plan.critic_updates is not None:
        numbers |= {
            f"critic_{name}": value
            for name, value in plan.critic_updates.to_dict().items()
        }
    derived = rollout.checked(exported).derived()
    for name in _SHARED:
        if (
            value := numbers.get(name)
        ) is not None:  # with a token budget the number of passes is open
            found = derived.get(name, value)
            rollout.require(
                found == value,
                "export",
                f"{name} would be {found:,} instead of {value:,}",
            )
    return exported


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The system that something is exported to."""

    system: str

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise an error unless a condition of the system holds."""
        if not condition:
            raise ConfigError(
                f"{NAMES[self.system]} cannot run this plan: {reason}", key=key
            )

    def checked(self, exported: Exported) -> Job:
        """Return the numbers of an exported file by the rules of its system, which it
        must satisfy.
        """
        dialect = load_dialect(self.system)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "exported.yml"
            path.write_text(exported.to_yaml(self.system), encoding="utf-8")
            job = dialect.job(
                dialect.read(
                    path, [f"{key}={value}" for key, value in exported.facts.items()]
                )
            )
        for broken in find_violations(dialect, job):
            _Target.require(self, False, broken.keys[0], broken.message)
        return job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollout(_Target):
    """A rollout, and the system that it is exported to."""

    config: RolloutConfig
    plan: RolloutPlan
    axes: MeshAxes
    num_devices: int

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise an error that begins with the key unless a condition of the system
        holds.
        """
        _Target.require(self, condition, key, f"{key}: {reason}")

    def require_replicas(self) -> None:
        """Refuse axes that the system has no key for."""
        devices = (
            self.axes.tensor
            * self.axes.pipeline
            * self.axes.context
            * self.plan.policy.data_parallel_size
        )
        reason = (
            "the devices that share a sample must be those of the tensor, pipeline and"
            " context axes"
        )
        self.require(self.num_devices == devices, "ici_expert_parallelism", reason)

    def whole(self, number: int, divisor: int, key: str, what: str) -> int:
        """Return a quotient that must be a whole number."""
        self.require(
            number % divisor == 0,
            key,
            f"{what} = {number:,} / {divisor:,} must be a whole number",
        )
        return number // divisor

    def aggregation(self) -> str:
        """Return the system's name of how the losses of tokens add up."""
        names = _LOSSES[self.system]
        mode, known = self.config.loss_agg_mode, ", ".join(names)
        self.require(
            mode in names,
            "rl.loss_agg_mode",
            f"it does not add up losses by {mode}, but by {known}",
        )
        return names[mode]

    def prompts(self, samples: int, key: str, what: str) -> int:
        """Return a number of samples as prompts."""
        return self.whole(
            samples, self.plan.samples_per_prompt, key, f"{what} in prompts"
        )

    def mini(self, updates: Updates) -> int:
        """Return the prompts of a mini batch."""
        prefix, whose = (
            ("critic_", "the critic's")
            if updates is self.plan.critic_updates
            else ("", "the")
        )
        return self.prompts(
            updates.mini_batch_samples,
            f"{prefix}mini_batch_size",
            f"{whose} mini batch",
        )

    def micro(self, updates: Updates) -> int:
        """Return the samples of a pass and replica."""
        self.require(
            updates.microbatch_size is not None,
            "token_budget",
            "it has no token budget; set microbatch_size",
        )
        assert updates.microbatch_size is not None
        return updates.microbatch_size

    @property
    def per_node(self) -> int:
        """Devices per node."""
        return max(
            n for n in range(1, MAX_DEVICES_PER_NODE + 1) if self.num_devices % n == 0
        )

    @property
    def megatron(self) -> bool:
        """Whether devices share a layer, or the layers: what Megatron's backend is
        for.
        """
        return self.axes.tensor * self.axes.pipeline > 1

    def megatron_sizes(self, group: str) -> dict[str, int]:
        """Return the sizes of Megatron under their keys, which veRL and SkyRL share."""
        sizes = {
            "tensor_model": self.axes.tensor,
            "pipeline_model": self.axes.pipeline,
            "context": self.axes.context,
        }
        return {f"{group}.{name}_parallel_size": size for name, size in sizes.items()}


def _to_maxtext_rl(rollout: _Rollout) -> Exported:
    plan, config = rollout.plan, rollout.config
    rollout.require(
        plan.critic is None,
        "enable_critic",
        "its GRPO learner has no critic; set enable_critic=false",
    )
    rollout.require(
        not plan.policy_updates.padded_samples,
        "pad_microbatches",
        "it does not pad mini batches",
    )
    rollout.micro(plan.policy_updates)
    mini = rollout.mini(plan.policy_updates)
    train = rollout.whole(
        mini,
        plan.policy_updates.accumulation_steps or 1,
        "microbatch_size",
        "the microbatch in prompts",
    )
    generation = rollout.prompts(
        plan.sequences_per_call, "rollout_micro_batch_size", "a call of the generator"
    )
    for name, size in (
        ("train_micro_batch_size", train),
        ("rollout_micro_batch_size", generation),
    ):
        rollout.whole(plan.prompts_per_step, size, name, f"batch_size / {name}")
    rollout.require(
        mini == plan.prompts_per_step,
        "mini_batch_size",
        "it updates once per pass over the samples of a step",
    )
    keys: dict[str, Any] = {
        "batch_size": plan.prompts_per_step,
        "train_micro_batch_size": train,
        "rollout_micro_batch_size": generation,
        "num_batches": config.num_batches,
        "train_fraction": float(config.train_fraction),
        "num_epoch": config.num_epoch,
        "num_test_batches": config.num_test_batches,
        "eval_batch_size": config.eval_batch_size,
        "test_batch_start_index": config.test_batch_start_index,
        "max_prefill_predict_length": config.max_prompt_length,
        "max_target_length": config.max_prompt_length + config.max_response_length,
        "rl.num_generations": plan.samples_per_prompt,
        "rl.num_iterations": plan.policy.num_epochs,
        "rl.loss_agg_mode": rollout.aggregation(),
    }
    keys |= {
        f"ici_{axis}_parallelism": size
        for axis in AXES
        if (size := getattr(rollout.axes, axis)) > 1 or axis == "fsdp"
    }
    facts = {} if config.num_prompts is None else {"num_prompts": config.num_prompts}
    return Exported(values=keys, facts=facts)


def _to_verl(rollout: _Rollout) -> Exported:
    plan = rollout.plan
    config = rollout.config
    actor = "actor_rollout_ref.actor"
    rollout.require_replicas()

    def passes(role: str, updates: Updates) -> dict[str, Any]:
        if updates.token_budget is None:
            return {
                f"{role}.use_dynamic_bsz": False,
                f"{role}.ppo_micro_batch_size_per_gpu": rollout.micro(updates),
            }
        # veRL counts the budget per device, of those that share a sequence.
        budget = rollout.whole(
            updates.token_budget,
            rollout.axes.context,
            "token_budget",
            "tokens per device",
        )
        return {
            f"{role}.use_dynamic_bsz": True,
            f"{role}.ppo_max_token_len_per_gpu": budget,
        }

    def parallel(role: str, fsdp: str) -> dict[str, Any]:
        if rollout.megatron:
            return rollout.megatron_sizes(f"{role}.megatron")
        return (
            {f"{fsdp}.ulysses_sequence_parallel_size": rollout.axes.context}
            if rollout.axes.context > 1
            else {}
        )

    values: dict[str, Any] = {
        **({"model_engine": "megatron"} if rollout.megatron else {}),
        "data.train_batch_size": plan.prompts_per_step,
        "data.max_prompt_length": config.max_prompt_length,
        "data.max_response_length": config.max_response_length,
        "actor_rollout_ref.rollout.n": plan.samples_per_prompt,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        f"{actor}.ppo_mini_batch_size": rollout.mini(plan.policy_updates),
        f"{actor}.ppo_epochs": plan.policy.num_epochs,
        f"{actor}.use_kl_loss": config.enable_reference_policy,
        f"{actor}.loss_agg_mode": rollout.aggregation(),
        **passes(actor, plan.policy_updates),
        **parallel(actor, f"{actor}.fsdp_config"),
        "algorithm.adv_estimator": "grpo" if plan.critic is None else "gae",
        "trainer.n_gpus_per_node": rollout.per_node,
        "trainer.nnodes": rollout.num_devices // rollout.per_node,
        "trainer.total_epochs": config.num_epoch,
    }
    if (size := plan.policy_updates.microbatch_size) is not None:
        for role in (
            ("rollout", "ref") if config.enable_reference_policy else ("rollout",)
        ):
            values[f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu"] = size
    if config.enable_reference_policy:
        values |= parallel("actor_rollout_ref.ref", "actor_rollout_ref.ref.fsdp_config")
    if plan.critic_updates is not None:
        values["critic.enable"] = True
        values["critic.ppo_mini_batch_size"] = rollout.mini(plan.critic_updates)
        values["critic.ppo_epochs"] = plan.critic_updates.num_epochs
        values |= passes("critic", plan.critic_updates)
        values |= parallel("critic", "critic.fsdp")
    # An agent loop's workers share the prompts of a step evenly.
    values["actor_rollout_ref.rollout.agent.num_workers"] = max(
        n for n in range(1, 9) if plan.samples_per_step % n == 0
    )
    return Exported(values=values)


def _to_skyrl(rollout: _Rollout) -> Exported:
    plan, config = rollout.plan, rollout.config
    rollout.require_replicas()
    policy, critic = plan.policy_updates, plan.critic_updates
    values: dict[str, Any] = {
        "trainer.train_batch_size": plan.prompts_per_step,
        "trainer.policy_mini_batch_size": rollout.mini(policy),
        "trainer.update_epochs_per_batch": plan.policy.num_epochs,
        "trainer.epochs": config.num_epoch,
        "trainer.algorithm.use_kl_loss": config.enable_reference_policy,
        "trainer.algorithm.loss_reduction": rollout.aggregation(),
        "generator.n_samples_per_prompt": plan.samples_per_prompt,
        "generator.eval_n_samples_per_prompt": plan.eval_samples_per_prompt,
    }
    if plan.eval_prompts:
        values["trainer.eval_batch_size"] = (
            config.eval_batch_size
            if config.eval_batch_size != AUTO
            else config.batch_size
        )
    if policy.token_budget is None:
        values["trainer.micro_train_batch_size_per_gpu"] = rollout.micro(policy)
        values["trainer.micro_forward_batch_size_per_gpu"] = rollout.micro(policy)
    else:
        # Its check applies the rules of the unused size too; 1 satisfies them.
        values |= {
            "trainer.max_tokens_per_microbatch": policy.token_budget,
            "trainer.micro_train_batch_size_per_gpu": 1,
        }
    notes: tuple[str, ...] = ()
    models = ["policy", *(["ref"] if config.enable_reference_policy else [])]
    if critic is not None:
        for name, own, other in (
            ("critic_num_iterations", critic.num_epochs, policy.num_epochs),
            (
                "critic_train_micro_batch_size",
                critic.microbatch_size,
                policy.microbatch_size,
            ),
        ):
            rollout.require(
                own == other,
                name,
                f"critic and policy share one key for it, but have {own} and {other}",
            )
        values["trainer.critic.model.path"] = "critic"
        values["trainer.algorithm.advantage_estimator"] = "gae"
        values["trainer.critic_mini_batch_size"] = rollout.mini(critic)
        models.append("critic")
        notes = ("Put the path of the critic into trainer.critic.model.path.",)
    if rollout.megatron:
        rollout.require(
            critic is None,
            "enable_critic",
            "with tensor or pipeline parallelism (Megatron) it has no critic",
        )
        values["trainer.strategy"] = "megatron"
    for model in models:
        values[f"trainer.placement.{model}_num_gpus_per_node"] = rollout.per_node
        values[f"trainer.placement.{model}_num_nodes"] = (
            rollout.num_devices // rollout.per_node
        )
        if rollout.megatron:
            values |= rollout.megatron_sizes(f"trainer.{model}.megatron_config")
        elif rollout.axes.context > 1:
            values[f"trainer.{model}.sequence_parallel_size"] = rollout.axes.context
    values["generator.inference_engine.num_engines"] = rollout.num_devices
    return Exported(values=values, notes=notes)


EXPORTS = {
    "maxtext_rl": _to_maxtext_rl,
    "verl": _to_verl,
    "skyrl": _to_skyrl,
}


def export_plan(config: Config, plan: RampPlan, system: str) -> Exported:
    """Return what one of `PLAN_EXPORTS` needs to run a plan's batches, checked by its
    rules, or refuse what it cannot run.
    """
    if system not in PLAN_EXPORTS:
        raise choice_error("export", system, list(PLAN_EXPORTS))
    run = _Run(system=system, config=config, plan=plan)
    run.require(
        not plan.follows,
        "batch_size_schedule",
        "it cannot follow the measured noise; give a schedule",
    )
    exported = PLAN_EXPORTS[system](run)
    # The ramp that the system would run must be that of the plan; notes name rows that
    # it reads and does not train on.
    job, notes = run.checked(exported), list(exported.notes)
    found: list[tuple[int, int, int]] = []
    if isinstance(job, MegatronJob):
        ramp = job.ramp
        if job.has_schedule:
            # The thresholds as Megatron's floating-point numbers give them.
            ramp = BatchRamp.piecewise(
                [(entry.as_run, entry.size) for entry in job.thresholds]
            )
        found = _rows(ramp) if ramp else []
    elif isinstance(job, MaxTextJob):
        found = job.ramp_phases or [(0, job.sizes.to_train, 0)]
        if lost := job.lost_at_ramp_end:
            notes.append(
                f"MaxText's loader drops {lost:,} rows at the end of the ramp; those"
                " after it move up."
            )
        if job.dropped_per_step:
            notes.append(
                "MaxText loads a full sample per device and drops"
                f" {job.dropped_per_step:,} rows in every step."
            )
    for expected, row in itertools.zip_longest(_rows(plan.ramp), found):
        run.require(
            expected == row,
            "export",
            f"a phase would be (step, batch, sample) {row} instead of {expected}",
        )
    return replace(exported, notes=tuple(notes))


def _rows(ramp: BatchRamp) -> list[tuple[int, int, int]]:
    return [
        (phase.start_step, phase.global_batch_size, phase.start_sample)
        for phase in ramp.phases
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run(_Target):
    """A plan, and the system that it is exported to."""

    config: Config
    plan: RampPlan

    @property
    def grows(self) -> bool:
        """Whether there is more than one phase."""
        return len(self.plan.ramp.phases) > 1

    def changes(self) -> list[tuple[Phase, int, Phase, int]]:
        """Return each phase and its batch with the next phase and its batch."""
        pairs = itertools.pairwise(self.plan.ramp.phases)
        return [
            (before, before.global_batch_size, phase, phase.global_batch_size)
            for before, phase in pairs
        ]

    def microbatch(self) -> int:
        """Return the samples of a replica in a pass, which must be the same in all
        phases.
        """
        first = self.plan.splits[0].microbatch_size
        for phase, split in zip(self.plan.ramp.phases, self.plan.splits, strict=True):
            reason = (
                f"{phase}, has microbatches of {split.microbatch_size:,} samples, but"
                " it has one size for all phases"
            )
            self.require(
                split.microbatch_size == first,
                "rampup_microbatch",
                f"{reason}; set rampup_microbatch=fixed",
            )
        return first

    def require_axes(self, *axes: str) -> None:
        """Refuse mesh axes that the system has no key for."""
        for axis, slices in zip(AXES, self.plan.axes.slices, strict=True):
            size = getattr(self.plan.axes, axis)
            key = f"{'ici' if size > slices else 'dcn'}_{axis}_parallelism"
            self.require(
                size == 1 or axis in ("data", "fsdp", *axes),
                key,
                f"it has no axis like {axis}={size}; set {key}=1",
            )

    def notes(self, *clocks: str) -> Iterator[str]:
        """Yield the hyperparameters that differ in a system whose learning rate counts
        one of `clocks` and is the same for every batch.
        """
        if not self.grows:
            return
        name, plan = NAMES[self.system], self.plan
        if plan.rate.clock not in clocks:
            yield (
                f"The learning rate of {name} counts {clocks[0]}; that of the plan"
                f" counts {plan.rate.clock}."
            )
        if plan.seesaw or plan.rate.batch_scaling != "none":
            yield (
                f"The learning rate of {name} is the same for every batch; that of the"
                " plan changes with it."
            )
        if self.config.batch_rule[1].is_active:
            yield (
                "AdamW's constants follow the batch in the plan"
                f" (batch_scaling={self.config.batch_scaling}), not in {name}."
            )


def _to_maxtext(run: _Run) -> Exported:
    """Return MaxText's keys. Its ramp knows no accumulation, so that every batch of a
    ramp is one pass.
    """
    plan = run.plan
    config = run.config
    *ramp, last = plan.ramp.phases
    passes = plan.splits[-1].accumulation_steps
    values: dict[str, Any] = {
        "gradient_accumulation_steps": 1 if ramp else passes,
        "steps": plan.total_steps,
        "max_target_length": config.max_target_length,
    }
    if plan.schedule_steps != plan.total_steps:
        values["learning_rate_schedule_steps"] = plan.schedule_steps
    factor = config.expansion_factor_real_data
    if factor > 0:
        values["expansion_factor_real_data"] = to_yaml_number(factor)
    for axis, slices in zip(AXES, plan.axes.slices, strict=True):
        values |= {
            f"ici_{axis}_parallelism": getattr(plan.axes, axis) // slices,
            f"dcn_{axis}_parallelism": slices,
        }
    if plan.splitter.num_stages > 1:
        layers = config.base_num_decoder_layers
        repeats = plan.splitter.num_repeats
        values |= {
            # One number for all batches: the smallest, as each batch is one pass.
            "num_pipeline_microbatches": min(
                split.num_pipeline_microbatches for split in plan.splits
            ),
            "num_pipeline_repeats": repeats,
            "num_layers_per_pipeline_stage": (
                layers // (plan.splitter.num_stages * repeats)
            ),
            "base_num_decoder_layers": layers,
        }

    values["per_device_batch_size"] = _per_device(
        run, last.global_batch_size, values["gradient_accumulation_steps"]
    )
    notes = list(run.notes("steps"))
    if ramp:
        values |= _maxtext_ramp(run)
        if passes > 1 and plan.splitter.num_stages == 1:
            largest = last.global_batch_size // plan.splitter.data_parallel_size
            notes.append(
                "MaxText runs each of these batches in one pass, of up to"
                f" {largest:,} samples per replica, where the plan has several."
            )
    return Exported(
        values=values, facts={"num_devices": plan.num_devices}, notes=tuple(notes)
    )


def _per_device(run: _Run, samples: int, passes: int = 1) -> Any:
    """Return samples for each device and pass, which MaxText takes as a decimal."""
    parts = run.plan.num_devices * passes
    number = to_yaml_number(Fraction(samples, parts))
    run.require(
        not isinstance(number, str),
        "per_device_batch_size",
        f"per_device_batch_size = {samples:,} / {parts:,} = {number} must be a decimal",
    )
    return number


def _maxtext_ramp(run: _Run) -> dict[str, Any]:
    """Return the keys of a ramp that grows by the same number in phases of equal
    shares.
    """
    plan, config = run.plan, run.config
    start, growth = plan.ramp.sizes[0], plan.ramp.sizes[1] - plan.ramp.sizes[0]
    shares = len(plan.ramp.phases) - 1
    # MaxText counts every phase from zero, n steps of size b for a share of (n - 1)
    # * b < share <= n * b samples.
    least, most = 0, plan.ramp.ramp_samples * shares
    for before, size, phase, after in run.changes():
        run.require(
            growth > 0 and after - size == growth,
            "batch_size_schedule",
            f"{phase}, grows from {size:,} to {after:,} samples, but its ramp grows by"
            " the same number in every phase",
        )
        assert before.num_steps is not None
        least = max(least, (before.num_steps - 1) * size * shares)
        most = min(most, before.num_steps * size * shares)
        run.require(
            least < most,
            "batch_size_schedule",
            f"{before}, has {before.num_steps:,} steps, but its phases have equal"
            " shares of global_rampup_samples, each counted from zero, as with"
            " rampup_carry_overshoot=false",
        )
    wanted = config.global_rampup_samples if config.enable_rampup_batch_size else most
    return {
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": _per_device(run, start),
        "per_device_batch_size_increment": _per_device(run, growth),
        "global_rampup_samples": wanted if least < wanted <= most else most,
    }


def _to_megatron(run: _Run) -> Exported:
    """Return Megatron's arguments, with a step schedule in tokens, as its trainer
    passes the sequence length.
    """
    plan, config = run.plan, run.config
    micro = run.microbatch()
    length = config.max_target_length
    splitter = run.plan.splitter
    run.require_axes("tensor", "context", "pipeline")
    for _, size, phase, after in run.changes():
        reason = (
            f"{phase}, shrinks from {size:,} to {after:,} samples, where its trainer"
            " stops"
        )
        run.require(after > size, "batch_size_schedule", reason)
    values: dict[str, Any] = {"micro_batch_size": micro, "seq_length": length}
    if run.grows:
        entries = [
            f"{phase.start_sample * length}:{phase.global_batch_size}"
            for phase in plan.ramp.phases
        ]
        values["step_batch_size_schedule"] = " ".join(entries)
    else:
        values["global_batch_size"] = plan.ramp.sizes[0]
    if plan.rate.clock == "samples":
        values["train_samples"] = plan.consumed_samples
    else:
        values["train_iters"] = plan.total_steps
    for axis, name in (
        ("tensor", "tensor_model"),
        ("pipeline", "pipeline_model"),
        ("context", "context"),
    ):
        values[f"{name}_parallel_size"] = getattr(plan.axes, axis)
    if splitter.num_stages > 1:
        values["num_layers"] = config.base_num_decoder_layers
        if splitter.num_repeats > 1:
            values["virtual_pipeline_model_parallel_size"] = splitter.num_repeats
    words = [
        f"--{key.replace('_', '-')} {shlex.quote(str(value))}"
        for key, value in values.items()
    ]
    notes = [
        f"As arguments: {' '.join(words)}",
        *run.notes("samples", "steps"),
    ]
    if run.grows:
        notes.append("Megatron-LM has the step schedule since April 2026.")
    return Exported(
        values=values, facts={"world_size": plan.num_devices}, notes=tuple(notes)
    )


PLAN_EXPORTS = {
    "maxtext": _to_maxtext,
    "megatron": _to_megatron,
}
NAMES = {
    "maxtext": "MaxText",
    "maxtext_rl": "MaxText RL",
    "megatron": "Megatron-LM",
    "skyrl": "SkyRL",
    "verl": "veRL",
}
