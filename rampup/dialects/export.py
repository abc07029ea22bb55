"""A rollout's configuration in the keys of another system: `rampup plan rl.yml --export SYSTEM`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rampup.config.build import mesh_axes
from rampup.dialects import SYSTEMS, load_dialect
from rampup.dialects.rules import Job, find_violations
from rampup.errors import ConfigError, choice_error
from rampup.plan.mesh_axes import AXES, MeshAxes
from rampup.plan.numbers import AUTO
from rampup.rl.config import RolloutConfig
from rampup.rl.plan import RolloutPlan, Updates

MAX_DEVICES_PER_NODE = 8
_STEP = ("mini_batches", "mini_batch_samples", "optimizer_steps")
SHARED = ("data_parallel_size", "samples_per_step", *_STEP, "accumulation_steps", *(f"critic_{name}" for name in _STEP))
# The systems' names of the values of rl.loss_agg_mode that they know.
_MAXTEXT_LOSSES = {"token-mean": "token-mean", "seq-mean-token-mean": "sequence-mean-token-mean"}
_SKYRL_LOSSES = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
_VERL_LOSSES = {mode: mode for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
_TRLX_LOSSES = {"token-mean": "token-mean"}  # it has no key for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A rollout or a run in another system's keys."""

    values: Mapping[str, Any]  # by dotted key
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the system takes elsewhere, as `rampup check` does
    notes: tuple[str, ...] = ()  # what the system does otherwise than the plan, or needs in addition

    def to_yaml(self, system: str) -> str:
        """Return the text of the file, with the notes as comments."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *groups, name = key.split(".")
            place = tree
            for group in groups:
                place = place.setdefault(group, {})
            place[name] = value
        check = " ".join(["rampup check FILE --from", system, *(f"{key}={value}" for key, value in self.facts.items())])
        head = [f"The sizes of a {'rollout' if system in EXPORTS else 'run'} for {NAMES[system]}, as rampup planned it."]
        head += [f"Check: {check}"] if system in SYSTEMS else []
        comments = "".join(f"# {line}\n" for line in [*head, *self.notes])
        return comments + yaml.safe_dump(tree, sort_keys=False, default_flow_style=False)


def export_rollout(config: RolloutConfig, plan: RolloutPlan, num_devices: int, system: str) -> Exported:
    """Return a rollout's batches in the keys of one of `EXPORTS`, checked by its rules, or refuse what it cannot run."""
    if system not in EXPORTS:
        raise choice_error("export", system, list(EXPORTS))
    rollout = _Rollout(system=system, config=config, plan=plan, axes=mesh_axes(config, num_devices), num_devices=num_devices)
    for name in ("batch_size_schedule", "num_generations_schedule"):
        rollout.require(getattr(config, name) is None, f"rl.{name}", "its batch cannot grow; set it to null")
    for name, fixed in (("zero_spread_groups", "keep"), ("token_batch_size", AUTO), ("partial_step", "train")):
        rollout.require(getattr(config, name) == fixed, name, f"only steps of the planned size are exported; set it to {fixed}")
    exported = EXPORTS[system](rollout)
    # The numbers that the exported file must have, by the names that all systems share.
    numbers = {"samples_per_step": plan.samples_per_step, **plan.policy_updates.to_dict()}
    if plan.critic_updates is not None:
        numbers |= {f"critic_{name}": value for name, value in plan.critic_updates.to_dict().items()}
    derived = rollout.checked(exported).derived()
    for name in SHARED:
        value = numbers.get(name)
        found = derived.get(name, value)
        if value is not None:  # with a token budget the number of passes is open
            rollout.require(found == value, "export", f"{name} would be {found:,} instead of {value:,}")
    return exported


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The system that something is exported to."""

    system: str

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise an error unless a condition of the system holds."""
        if not condition:
            raise ConfigError(f"{NAMES[self.system]} cannot run this plan: {reason}", key=key)

    def checked(self, exported: Exported) -> Job:
        """Return the numbers of an exported file by the rules of its system, which it must satisfy."""
        dialect = load_dialect(self.system)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "exported.yml"
            path.write_text(exported.to_yaml(self.system), encoding="utf-8")
            job = dialect.job(dialect.read(path, [f"{key}={value}" for key, value in exported.facts.items()]))
        for broken in find_violations(dialect, job):
            Target.require(self, False, broken.keys[0], broken.message)
        return job


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rollout(Target):
    """A rollout, and the system that it is exported to."""

    config: RolloutConfig
    plan: RolloutPlan
    axes: MeshAxes
    num_devices: int

    def require(self, condition: bool, key: str, reason: str) -> None:
        """Raise an error that begins with the key unless a condition of the system holds."""
        Target.require(self, condition, key, f"{key}: {reason}")

    def require_replicas(self) -> None:
        """Refuse axes that the system has no key for."""
        self.require(
            self.num_devices == self.axes.tensor * self.axes.pipeline * self.axes.context * self.plan.policy.data_parallel_size,
            "ici_expert_parallelism",
            "the devices that share a sample must be those of the tensor, pipeline and context axes",
        )

    def whole(self, number: int, divisor: int, key: str, what: str) -> int:
        """Return a quotient that must be a whole number."""
        self.require(number % divisor == 0, key, f"{what} = {number:,} / {divisor:,} must be a whole number")
        return number // divisor

    def aggregation(self, names: Mapping[str, str]) -> str:
        """Return the system's name of how the losses of tokens add up."""
        mode, known = self.config.loss_agg_mode, ", ".join(names)
        self.require(mode in names, "rl.loss_agg_mode", f"it does not add up losses by {mode}, but by {known}")
        return names[mode]

    def prompts(self, samples: int, key: str, what: str) -> int:
        """Return a number of samples as prompts."""
        return self.whole(samples, self.plan.samples_per_prompt, key, f"{what} in prompts")

    def mini(self, updates: Updates) -> int:
        """Return the prompts of a mini batch."""
        prefix, whose = ("critic_", "the critic's") if updates is self.plan.critic_updates else ("", "the")
        return self.prompts(updates.mini_batch_samples, f"{prefix}mini_batch_size", f"{whose} mini batch")

    def micro(self, updates: Updates) -> int:
        """Return the samples of a pass and replica."""
        self.require(updates.microbatch_size is not None, "token_budget", "it has no token budget; set microbatch_size")
        assert updates.microbatch_size is not None
        return updates.microbatch_size

    @property
    def per_node(self) -> int:
        """Devices per node."""
        return max(n for n in range(1, MAX_DEVICES_PER_NODE + 1) if self.num_devices % n == 0)

    @property
    def megatron(self) -> bool:
        """Whether devices share a layer, or the layers: what Megatron's backend is for."""
        return self.axes.tensor * self.axes.pipeline > 1

    def megatron_sizes(self, group: str) -> dict[str, int]:
        """Return the sizes of Megatron under their keys, which veRL and SkyRL share."""
        sizes = {"tensor_model": self.axes.tensor, "pipeline_model": self.axes.pipeline, "context": self.axes.context}
        return {f"{group}.{name}_parallel_size": size for name, size in sizes.items()}


def _export_maxtext_rl(rollout: _Rollout) -> Exported:
    plan, config = rollout.plan, rollout.config
    rollout.require(plan.critic is None, "enable_critic", "its GRPO learner has no critic; set enable_critic=false")
    rollout.require(not plan.policy_updates.padded_samples, "pad_microbatches", "it does not pad mini batches")
    rollout.micro(plan.policy_updates)
    mini = rollout.mini(plan.policy_updates)
    train = rollout.whole(mini, plan.policy_updates.accumulation_steps or 1, "microbatch_size", "the microbatch in prompts")
    generation = rollout.prompts(plan.sequences_per_call, "rollout_micro_batch_size", "a call of the generator")
    for name, size in (("train_micro_batch_size", train), ("rollout_micro_batch_size", generation)):
        rollout.whole(plan.prompts_per_step, size, name, f"batch_size / {name}")
    rollout.require(mini == plan.prompts_per_step, "mini_batch_size", "it updates once per pass over the samples of a step")
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
        "rl.loss_agg_mode": rollout.aggregation(_MAXTEXT_LOSSES),
    }
    keys |= {f"ici_{axis}_parallelism": size for axis in AXES if (size := getattr(rollout.axes, axis)) > 1 or axis == "fsdp"}
    facts = {} if config.num_prompts is None else {"num_prompts": config.num_prompts}
    return Exported(values=keys, facts=facts)


def _export_verl(rollout: _Rollout) -> Exported:
    plan = rollout.plan
    config = rollout.config
    actor = "actor_rollout_ref.actor"
    rollout.require_replicas()

    def passes(role: str, updates: Updates) -> dict[str, Any]:
        if updates.token_budget is None:
            return {f"{role}.use_dynamic_bsz": False, f"{role}.ppo_micro_batch_size_per_gpu": rollout.micro(updates)}
        # veRL counts the budget per device, of those that share a sequence.
        budget = rollout.whole(updates.token_budget, rollout.axes.context, "token_budget", "tokens per device")
        return {f"{role}.use_dynamic_bsz": True, f"{role}.ppo_max_token_len_per_gpu": budget}

    def parallel(role: str, fsdp: str) -> dict[str, Any]:
        if rollout.megatron:
            return rollout.megatron_sizes(f"{role}.megatron")
        return {f"{fsdp}.ulysses_sequence_parallel_size": rollout.axes.context} if rollout.axes.context > 1 else {}

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
        f"{actor}.loss_agg_mode": rollout.aggregation(_VERL_LOSSES),
        **passes(actor, plan.policy_updates),
        **parallel(actor, f"{actor}.fsdp_config"),
        "algorithm.adv_estimator": "grpo" if plan.critic is None else "gae",
        "trainer.n_gpus_per_node": rollout.per_node,
        "trainer.nnodes": rollout.num_devices // rollout.per_node,
        "trainer.total_epochs": config.num_epoch,
    }
    if (size := plan.policy_updates.microbatch_size) is not None:
        for role in ("rollout", "ref") if config.enable_reference_policy else ("rollout",):
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
    values["actor_rollout_ref.rollout.agent.num_workers"] = max(n for n in range(1, 9) if plan.samples_per_step % n == 0)
    return Exported(values=values)


def _export_skyrl(rollout: _Rollout) -> Exported:
    plan, config = rollout.plan, rollout.config
    rollout.require_replicas()
    policy, critic = plan.policy_updates, plan.critic_updates
    values: dict[str, Any] = {
        "trainer.train_batch_size": plan.prompts_per_step,
        "trainer.policy_mini_batch_size": rollout.mini(policy),
        "trainer.update_epochs_per_batch": plan.policy.num_epochs,
        "trainer.epochs": config.num_epoch,
        "trainer.algorithm.use_kl_loss": config.enable_reference_policy,
        "trainer.algorithm.loss_reduction": rollout.aggregation(_SKYRL_LOSSES),
        "generator.n_samples_per_prompt": plan.samples_per_prompt,
        "generator.eval_n_samples_per_prompt": plan.eval_samples_per_prompt,
    }
    if plan.eval_prompts:
        values["trainer.eval_batch_size"] = config.eval_batch_size if config.eval_batch_size != AUTO else config.batch_size
    if policy.token_budget is None:
        values["trainer.micro_train_batch_size_per_gpu"] = rollout.micro(policy)
        values["trainer.micro_forward_batch_size_per_gpu"] = rollout.micro(policy)
    else:
        # Its check applies the rules of the unused size too; 1 satisfies them.
        values |= {"trainer.max_tokens_per_microbatch": policy.token_budget, "trainer.micro_train_batch_size_per_gpu": 1}
    notes: tuple[str, ...] = ()
    models = ["policy", *(["ref"] if config.enable_reference_policy else [])]
    if critic is not None:
        for name, own, other in (
            ("critic_num_iterations", critic.num_epochs, policy.num_epochs),
            ("critic_train_micro_batch_size", critic.microbatch_size, policy.microbatch_size),
        ):
            rollout.require(own == other, name, f"critic and policy share one key for it, but have {own} and {other}")
        values["trainer.critic.model.path"] = "critic"
        values["trainer.algorithm.advantage_estimator"] = "gae"
        values["trainer.critic_mini_batch_size"] = rollout.mini(critic)
        models.append("critic")
        notes = ("Put the path of the critic into trainer.critic.model.path.",)
    if rollout.megatron:
        rollout.require(critic is None, "enable_critic", "with tensor or pipeline parallelism (Megatron) it has no critic")
        values["trainer.strategy"] = "megatron"
    for model in models:
        values[f"trainer.placement.{model}_num_gpus_per_node"] = rollout.per_node
        values[f"trainer.placement.{model}_num_nodes"] = rollout.num_devices // rollout.per_node
        if rollout.megatron:
            values |= rollout.megatron_sizes(f"trainer.{model}.megatron_config")
        elif rollout.axes.context > 1:
            values[f"trainer.{model}.sequence_parallel_size"] = rollout.axes.context
    values["generator.inference_engine.num_engines"] = rollout.num_devices
    return Exported(values=values, notes=notes)


def _export_trlx(rollout: _Rollout) -> Exported:
    plan, config = rollout.plan, rollout.config
    d = plan.policy.data_parallel_size
    rollout.require(plan.samples_per_prompt == 1, "rl.num_generations", "PPO generates one response per prompt; set it to 1")
    rollout.require(plan.critic is None, "enable_critic", "its value head is part of the policy; set enable_critic=false")
    rollout.require(not rollout.megatron, "ici_tensor_parallelism", "under Accelerate, every process has the whole model")
    rollout.aggregation(_TRLX_LOSSES)
    rollout.require_replicas()
    policy = plan.policy_updates
    collected = rollout.whole(plan.samples_per_step, d, "batch_size", "samples per process")
    values: dict[str, Any] = {
        "train.trainer": "AcceleratePPOTrainer",
        "train.batch_size": rollout.whole(policy.mini_batch_samples, d, "mini_batch_size", "the mini batch per process"),
        "train.minibatch_size": rollout.micro(policy),
        "train.epochs": plan.num_steps,
        "train.total_steps": plan.total_optimizer_steps,
        "train.seq_length": config.max_prompt_length + config.max_response_length,
        "method.name": "PPOConfig",
        "method.num_rollouts": collected,
        "method.chunk_size": rollout.whole(plan.sequences_per_call, d, "rollout_micro_batch_size", "a call per process"),
        "method.ppo_epochs": plan.policy.num_epochs,
        "method.gen_kwargs.max_new_tokens": config.max_response_length,
    }
    rollout.whole(collected, values["method.chunk_size"], "rollout_micro_batch_size", "calls of the generator")
    notes = (f"Start it with {d} processes: accelerate launch --num_processes {d}",)
    return Exported(values=values, facts={"num_processes": d}, notes=notes)


EXPORTS: Mapping[str, Callable[[_Rollout], Exported]] = {
    "maxtext_rl": _export_maxtext_rl,
    "verl": _export_verl,
    "skyrl": _export_skyrl,
    "trlx": _export_trlx,
}
NAMES = {"maxtext_rl": "MaxText RL", "verl": "veRL", "skyrl": "SkyRL", "trlx": "trlX"}
NAMES |= {"maxtext": "MaxText", "megatron": "Megatron-LM", "levanter": "Levanter", "olmo_core": "OLMo-core"}
