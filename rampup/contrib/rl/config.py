"""The configuration of a rollout: the keys of configs/rl.yml, its loading, and the
`RolloutPlan` that it describes.

Keys and meanings are those of MaxText RL. `python -m rampup.contrib.rl.config configs` writes
configs/rl.yml and its JSON schema.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from rampup.config.files import ConfigFile
from rampup.config.key import Settings, key, keys_of_alias
from rampup.config.load import load_settings, names_in
from rampup.config.rules import head_problems
from rampup.config.schema import KEYS as RAMP_KEYS
from rampup.config.schema import ModelKeys
from rampup.config.stages import mesh_axes
from rampup.contrib.rl.plan import (
    AGGREGATIONS,
    MAX_SAMPLES,
    Experience,
    RolloutPlan,
    Size,
    Training,
)
from rampup.contrib.rl.schedule import RolloutSchedule
from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.numbers import AUTO, to_yaml_number
from rampup.plan.ramp import parse_schedule

_count: dict[str, Any] = {"minimum": 1, "maximum": MAX_SAMPLES}
_batch = partial(key, section="Batch")
_training = partial(key, section="Training on the samples")
_eval = partial(key, section="Evaluation")
_stored = partial(key, section="Stored experience", own=True)
_order = partial(key, section="Order")
_sampling = partial(key, section="Sampling")
_task = partial(key, section="Task", own=True)


def _shared(name: str, default: Any) -> Any:
    """Return a key of configs/base.yml, with a default of its own."""
    return field(default=default, metadata={"key": RAMP_KEYS[name]})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Settings):
    """A complete, checked configuration of a rollout. Every attribute is a key of the
    YAML file, in the group `rl` or not.
    """

    # A key: its default, its properties, and its documentation, where a line break counts as a space.
    # fmt: off
    batch_size: int = _batch(32, "Prompts per step, for the whole job.", **_count, maxtext="1")
    num_generations: int = _batch(8, group="rl", **_count, maxtext="2", doc="""
        Responses per prompt. A step has batch_size * rl.num_generations samples.""")
    num_iterations: int = _batch(1, "Passes over the samples of a step.", group="rl", **_count)
    batch_size_schedule: str | None = _batch(None, kind="text", nullable=True, group="rl", own=True, doc="""
        Growth of batch_size, as STEP:PROMPTS pairs from step 0 on: "0:8 20:16 60:32". At most batch_size. null:
        constant.""")
    loss_agg_mode: str = _batch("token-mean", choices=AGGREGATIONS, group="rl", own=True, doc="""
        How the losses of tokens add up to that of a mini batch. token-mean: the mean over all tokens. seq-mean-token-sum: the
        mean over responses of the sum over their tokens. seq-mean-token-mean: the mean over responses of the mean over their
        tokens. group-mean-token-mean: the mean over prompts of the mean over the tokens of all their responses.""")
    grpo_beta: float = _batch(0.01, minimum=0, group="rl", maxtext="0.08", doc="""
        Weight of the KL divergence from the policy before training, whose log-probabilities are then stored. 0: none.""")
    grpo_epsilon: float = _batch(0.2, "How far from 1 the ratio of new to old probabilities counts.", above=0, group="rl")
    num_batches: int = _batch(100, **_count, maxtext="4", doc="""
        Batches of prompts in the run, before train_fraction and num_epoch apply.""")
    train_fraction: Fraction = _batch(Fraction(1), "Fraction of the prompts of num_batches to train on.", above=0, maximum=1)
    num_epoch: int = _batch(1, "Passes over the prompts.", **_count)
    num_prompts: int | None = _batch(None, kind="int", nullable=True, **_count, own=True, identity=True, doc="""
        Prompts in the data set. null: enough for num_batches.""")
    rollout_micro_batch_size: int = _batch(-1, also=(-1,), **_count, doc="""
        Prompts per call of the generator, for the whole job. -1: train_micro_batch_size, or mini_batch_size if that is -1
        too.""")
    zero_spread_groups: str = _batch("keep", choices=("keep", "refill"), own=True, identity=True, doc="""
        What to do with prompts whose responses all have the same reward, which teach GRPO nothing. keep: train on them.
        refill: sample other prompts in their place.""")
    max_num_gen_batches: int = _batch(10, minimum=1, maximum=1000, own=True, doc="""
        Batches of prompts that a step samples at most with zero_spread_groups refill. If they are not enough, the run ends.""")
    measure_gradient_noise: bool = _batch(False, own=True, doc="""
        Measure the gradient noise between prompts and between the responses to a prompt, which says how many of both are worth
        it. A pass needs several samples per replica.""")

    mini_batch_size: int = _training(-1, also=(-1,), **_count, own=True, doc="""
        Prompts per optimizer step, for the whole job. -1: batch_size, which MaxText RL always uses.""")
    train_micro_batch_size: int = _training(-1, also=(-1,), **_count, doc="""
        Prompts per forward and backward pass, for the whole job. -1: mini_batch_size. Excludes microbatch_size and
        token_budget.""")
    microbatch_size: int = _training(-1, also=(-1,), **_count, own=True, doc="""
        Samples per replica and pass. Excludes train_micro_batch_size and token_budget. -1: not used.""")
    token_budget: int = _training(-1, also=(-1,), **_count, own=True, doc="""
        Tokens per replica and pass, filled with as many samples as fit. Excludes train_micro_batch_size and microbatch_size.
        -1: not used.""")
    pad_microbatches: bool = _training(False, own=True, doc="""
        Pad mini batches and microbatches that do not divide with rows of weight 0. false: raise an error.""")

    num_test_batches: int = _eval(5, minimum=0, maximum=MAX_SAMPLES, doc="""
        Batches of one evaluation, including those before test_batch_start_index. 0: no evaluation.""")
    eval_batch_size: int = _eval(-1, "Prompts per evaluation batch. -1: batch_size.", also=(-1,), **_count)
    test_batch_start_index: int = _eval(0, minimum=0, maximum=MAX_SAMPLES, doc="""
        Prompts to skip at the start of the evaluation data.""")
    eval_num_generations: int = _eval(1, "Responses per prompt in an evaluation.", **_count, own=True)

    max_prompt_length: int = _stored(512, "Tokens of the longest prompt.", **_count, identity=True)
    max_response_length: int = _stored(1024, "Tokens of the longest response.", **_count, identity=True)
    data_shuffle_seed: int | None = _order(0, kind="int", nullable=True, minimum=0, maximum=2**31 - 1, own=True, identity=True, doc="""
        Seed of the order of samples, in which every pass shuffles the prompts of a step. null: keep the order of
        generation.""")

    decode_sampling_temperature: float = _sampling(1.0, minimum=0, maximum=100, maxtext="0.9", identity=True, doc="""
        Divides the logits in sampling and in the loss. 0 would make all responses to a prompt equal.""")
    decode_sampling_top_k: int = _sampling(0, minimum=0, maximum=MAX_SAMPLES, maxtext="50", identity=True, doc="""
        Sample from this many most probable tokens. 0: from all.""")
    decode_sampling_nucleus_p: float = _sampling(1.0, above=0, maximum=1, identity=True, doc="""
        Sample from the most probable tokens whose probabilities add up to this.""")

    max_operand: int = _task(49, minimum=1, maximum=10**6, identity=True, doc="""
        Largest number in a prompt. Prompts are sums of two numbers as text, such as 12+34=, with reward 1 for the right
        answer.""")
    warm_start_steps: int = _task(1200, minimum=0, maximum=MAX_SAMPLES, identity=True, doc="""
        Optimizer steps that imitate given answers before reinforcement learning, so that some responses have a reward. 0:
        none.""")
    warm_start_accuracy: float = _task(0.5, minimum=0, maximum=1, identity=True, doc="""
        Share of right answers among those that the warm start imitates; the others are wrong. The reward then teaches more than
        the answers did.""")
    warm_start_batch_size: int = _task(64, "Prompts per step of the warm start, for the whole job.", **_count, identity=True)
    warm_start_learning_rate: float = _task(3e-3, "Peak learning rate of the warm start.", minimum=0, identity=True)

    distributed: str = _shared("distributed", "auto")
    run_name: str = _shared("run_name", "")
    base_output_directory: str = _shared("base_output_directory", "runs")
    enable_tensorboard: bool = _shared("enable_tensorboard", False)
    wandb_project: str | None = _shared("wandb_project", None)
    log_period: int = _shared("log_period", 20)
    enable_checkpointing: bool = _shared("enable_checkpointing", True)
    checkpoint_period: int = _shared("checkpoint_period", 50)
    async_checkpointing: bool = _shared("async_checkpointing", True)
    max_num_checkpoints_to_keep: int | None = _shared("max_num_checkpoints_to_keep", 3)
    jax_cache_dir: str | None = _shared("jax_cache_dir", "~/.cache/rampup")
    eval_interval: int = _shared("eval_interval", 50)

    learning_rate: float = _shared("learning_rate", 1e-3)
    lr_schedule_type: str = _shared("lr_schedule_type", "constant")
    warmup_steps_fraction: float = _shared("warmup_steps_fraction", 0.0)
    warmup_steps: int | None = _shared("warmup_steps", None)
    learning_rate_final_fraction: float = _shared("learning_rate_final_fraction", 0.1)
    opt_type: str = _shared("opt_type", "adamw")
    skip_nonfinite: int = _shared("skip_nonfinite", 3)
    adam_b1: float = _shared("adam_b1", 0.9)
    adam_b2: float = _shared("adam_b2", 0.99)
    adam_eps: float = _shared("adam_eps", 1e-8)
    adam_weight_decay: float = _shared("adam_weight_decay", 0.0)
    gradient_clipping_threshold: float = _shared("gradient_clipping_threshold", 1.0)

    base_emb_dim: int = _shared("base_emb_dim", 64)
    base_num_decoder_layers: int = _shared("base_num_decoder_layers", 2)
    base_mlp_dim: int = _shared("base_mlp_dim", 256)
    base_num_query_heads: int = _shared("base_num_query_heads", 4)
    base_num_kv_heads: int = _shared("base_num_kv_heads", -1)
    dtype: str = _shared("dtype", "float32")
    init_weights_seed: int = _shared("init_weights_seed", 0)

    num_devices: int = _shared("num_devices", -1)
    ici_data_parallelism: int = _shared("ici_data_parallelism", -1)
    ici_fsdp_parallelism: int = _shared("ici_fsdp_parallelism", 1)
    ici_tensor_parallelism: int = _shared("ici_tensor_parallelism", 1)
    # fmt: on

    @property
    def prompts_used(self) -> int:
        """Prompts available to one pass of the run, counted as in MaxText RL."""
        requested = int(self.num_batches * self.batch_size * self.train_fraction)
        return (
            requested if self.num_prompts is None else min(requested, self.num_prompts)
        )

    @property
    def num_steps(self) -> int:
        """Steps of the run. Prompts that do not fill a batch are dropped."""
        return self.prompts_used * self.num_epoch // self.batch_size

    @property
    def eval_batch(self) -> int:
        """Prompts of one evaluation batch."""
        return self.batch_size if self.eval_batch_size == AUTO else self.eval_batch_size

    @property
    def eval_prompts(self) -> int:
        """Prompts of one evaluation: the full batches from test_batch_start_index
        on.
        """
        size = self.eval_batch
        return max(
            (self.num_test_batches * size - self.test_batch_start_index) // size * size,
            0,
        )

    num_kv_heads = ModelKeys.num_kv_heads

    def _contradictions(self) -> list[RampupError]:
        problems: list[RampupError] = []

        def refuse(problem: str, key: str, nearest: Any, fix: str = "") -> None:
            problems.append(ConfigError(problem, fix=fix, key=key, nearest=(nearest,)))

        sizes = ("train_micro_batch_size", "microbatch_size", "token_budget")
        given = [name for name in sizes if getattr(self, name) != AUTO]
        if len(given) > 1:
            settings = [f"{name}={getattr(self, name)}" for name in given]
            refuse(
                f"{' and '.join(settings)} all set the size of a pass",
                given[1],
                AUTO,
                "set all but one of them to -1",
            )
        if self.num_steps < 1:
            # The keys that leave fewer prompts than one batch: of the run, of the data
            # set, or both.
            minimum = -(-self.batch_size // self.num_epoch)
            enough = dict[str, Any]()
            if self.num_prompts is not None and self.num_prompts < minimum:
                enough["num_prompts"] = minimum
            share = Fraction(minimum, self.num_batches * self.batch_size)
            batches = math.ceil(share / self.train_fraction * self.num_batches)
            if batches > MAX_SAMPLES:
                enough["train_fraction"] = to_yaml_number(share)
            elif share > self.train_fraction:
                enough["num_batches"] = batches
            for name, value in enough.items():
                refuse(
                    f"{name}={getattr(self, name)} leaves {self.prompts_used} prompts *"
                    f" num_epoch={self.num_epoch}, which do not fill a"
                    f" batch_size={self.batch_size}",
                    name,
                    value,
                    f"nearest: {value}",
                )
        problems += head_problems(self)
        if self.num_test_batches > 0 and self.eval_prompts == 0:
            most = (self.num_test_batches - 1) * self.eval_batch
            refuse(
                f"test_batch_start_index={self.test_batch_start_index} leaves no full"
                f" batch of the {self.num_test_batches} * {self.eval_batch} prompts of"
                " an evaluation",
                "test_batch_start_index",
                most,
                f"nearest: {most}, or num_test_batches=0 for no evaluation",
            )
        return problems


ROLLOUT_KEYS = RolloutConfig.keys()


def is_rollout_file(path: str | Path) -> bool:
    """Return whether a file configures a rollout, like configs/rl.yml, judged by the
    keys that only one kind of file has.
    """
    rollout = {name.partition(".")[0] for name in ROLLOUT_KEYS} | set(ROLLOUT_KEYS)
    # A name that other systems use, such as batch_size, tells nothing.
    names = {name for name in names_in(path) if not keys_of_alias(name, RAMP_KEYS)[0]}
    return len(names & (rollout - set(RAMP_KEYS))) > len(
        names & (set(RAMP_KEYS) - rollout)
    )


def load_rollout_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
) -> RolloutConfig:
    """Load the configuration of a rollout, as `rampup.load_config` does that of a
    ramp.
    """
    return load_settings(RolloutConfig, path, overrides, environ=environ)


def build_rollout_plan(
    config: RolloutConfig, num_devices: int | None = None
) -> RolloutPlan:
    """Return the plan that a configuration describes. Without `num_devices`, its own,
    which then must not be -1.

    Raises:
        RampupError: the sizes are invalid. One error has all problems and the nearest
            legal values.
    """
    num_devices = config.num_devices if num_devices is None else num_devices
    if num_devices < 1:
        raise ConfigError(
            f"num_devices={num_devices} must be at least 1",
            key="num_devices",
            nearest=(1,),
        )
    try:
        axes = mesh_axes(config, num_devices)
        mini_batch = _prompts(config, "mini_batch_size", "batch_size")
        return RolloutPlan(
            rollout_batch=_prompts(config, "batch_size"),
            samples_per_prompt=config.num_generations,
            policy=Training(
                mini_batch=mini_batch,
                microbatch=_microbatch(config),
                num_epochs=config.num_iterations,
                data_parallel_size=axes.data_parallel_size,
            ),
            generation=_prompts(
                config, "rollout_micro_batch_size", "train_micro_batch_size"
            )
            or mini_batch,
            num_steps=config.num_steps,
            pad=config.pad_microbatches,
            eval_prompts=config.eval_prompts,
            eval_samples_per_prompt=config.eval_num_generations,
            experience=Experience(
                max_prompt_length=config.max_prompt_length,
                max_response_length=config.max_response_length,
                reference=config.grpo_beta > 0,
            ),
        )
    except RampupError as error:
        for problem in error.problems or (error,):
            if problem.key and (place := config.where(problem.key)) != "default":
                problem.args = (f"{problem} [{problem.key}: {place}]",)
        raise_together(error.problems or (error,))


def _prompts(config: RolloutConfig, *names: str) -> Size | None:
    """Return the first of some sizes in prompts that is set."""
    for name in names:
        if (count := getattr(config, name)) != AUTO:
            return Size(count=count, unit="prompts", key=name)
    return None


def _microbatch(config: RolloutConfig) -> Size | None:
    """Return the size of a pass that is set, if any."""
    for name, unit in (("microbatch_size", "samples"), ("token_budget", "tokens")):
        if (count := getattr(config, name)) != AUTO:
            return Size(count=count, unit=unit, scope="replica", key=name)
    return _prompts(config, "train_micro_batch_size")


def build_rollout_schedule(
    config: RolloutConfig, num_devices: int | None = None
) -> RolloutSchedule:
    """Return the rollouts of a configuration's run, whose batch grows if it has a
    schedule; see `build_rollout_plan`.
    """
    stages = []
    problems: list[RampupError] = []
    for first, prompts in _growth(config):
        try:
            plan = build_rollout_plan(replace(config, batch_size=prompts), num_devices)
            stages.append((first, plan))
        except RampupError as error:
            for problem in error.problems or (error,):
                if first:
                    problem.args = (f"with {prompts:,} prompts: {problem}",)
                problems.append(problem)
    raise_together(problems)
    return RolloutSchedule(stages=tuple(stages), num_rollouts=config.num_steps)


def _growth(config: RolloutConfig) -> list[tuple[int, int]]:
    """Return the first step of each stage and its prompts."""
    text, largest = config.batch_size_schedule, config.batch_size
    if text is None:
        return [(0, largest)]
    key = "rl.batch_size_schedule"
    try:
        pairs = parse_schedule(text)
    except RampupError as error:
        raise ConfigError(
            f"{key}={text!r}: {error}",
            fix="measure_gradient_noise=true shows how many prompts are worth it",
            key=key,
        ) from None
    steps, sizes = zip(*pairs, strict=True)
    rule = ""
    if steps[0] != 0 or sorted(set(steps)) != [*steps]:
        rule = "start at step 0, and its steps must increase"
    elif min(sizes) < 1 or max(sizes) > largest:
        rule = f"have sizes from 1 to batch_size={largest}, the largest"
    if rule:
        raise ConfigError(f"{key}={text!r} must {rule}", key=key)
    return pairs


def rollout_notes(config: RolloutConfig, plan: RolloutPlan) -> tuple[str, ...]:
    """Return sentences about legal settings that drop data or differ from MaxText
    RL.
    """
    grows = config.batch_size_schedule is not None
    prompts = config.prompts_used * config.num_epoch
    dropped = prompts - plan.num_steps * config.batch_size
    evaluated = config.num_test_batches * config.eval_batch
    lost = (evaluated - config.test_batch_start_index) % config.eval_batch
    batches = config.num_batches * config.train_fraction * config.num_epoch
    maxtext_steps = int(batches * config.num_iterations)
    notes = {
        "rl.num_generations=1 gives groups of one sample, whose advantage over the"
        " group is always 0, so `rampup train` refuses it; set 2 or more": (
            config.num_generations == 1
        ),
        f"{dropped:,} prompts do not fill a last batch_size={config.batch_size:,} and"
        " are dropped": dropped and not grows,
        f"{lost:,} prompts of an evaluation do not fill a batch of"
        f" {config.eval_batch:,} and are left out": evaluated and lost,
        f"the run has {plan.total_optimizer_steps:,} optimizer steps; MaxText RL would"
        f" schedule its learning rate for {maxtext_steps:,}": (
            maxtext_steps != plan.total_optimizer_steps and not grows
        ),
    }
    return tuple(note for note, applies in notes.items() if applies)


# By default nothing is split, so that a file of a few keys has no mini batches unless
# it sets them; rl.yml shows some.
ROLLOUT_FILE = ConfigFile(
    name="rl.yml",
    head="""\
# A step of reinforcement learning, for `rampup plan configs/rl.yml`: every key, its documentation and its value.
# Names and meanings are those of MaxText RL, if it has the key. If its default differs, the comment ends with it.
# A size in prompts counts prompts of the whole job; each prompt has rl.num_generations samples.
""",
    settings=RolloutConfig,
    overrides={"mini_batch_size": 16, "train_micro_batch_size": 8},
)

if __name__ == "__main__":
    ROLLOUT_FILE.write(sys.argv[1])
