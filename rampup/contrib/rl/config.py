"""The configuration of a rollout: the keys of configs/rl.yml, its loading, and the
`RolloutPlan` that it describes.

Keys and meanings are those of MaxText RL. `python -m rampup.contrib.rl.config configs` writes
configs/rl.yml and its JSON schema.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

from rampup.config.draft import mesh_axes
from rampup.config.files import ConfigFile
from rampup.config.key import Settings, keys_of_alias, read_keys
from rampup.config.load import load_settings, names_in
from rampup.config.rules import head_problems
from rampup.config.schema import KEYS as RAMP_KEYS
from rampup.config.schema import ModelKeys
from rampup.contrib.rl.plan import MAX_SAMPLES, Experience, RolloutPlan, Size, Training
from rampup.contrib.rl.schedule import RolloutSchedule
from rampup.errors import ConfigError, RampupError, raise_together
from rampup.plan.describe import format_count
from rampup.plan.numbers import AUTO, to_yaml_number
from rampup.plan.ramp import parse_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Settings):
    """A complete, checked configuration of a rollout. Every attribute is a key of the
    YAML file, in the group `rl` or not.
    """

    table: ClassVar = Settings.table | read_keys(__package__)

    batch_size: int = 32
    num_generations: int = 8
    num_iterations: int = 1
    batch_size_schedule: str | None = None
    loss_agg_mode: str = "token-mean"
    grpo_beta: float = 0.01
    grpo_epsilon: float = 0.2
    num_batches: int = 100
    train_fraction: Fraction = Fraction(1)
    num_epoch: int = 1
    num_prompts: int | None = None
    rollout_micro_batch_size: int = -1
    zero_spread_groups: str = "keep"
    max_num_gen_batches: int = 10
    measure_gradient_noise: bool = False

    mini_batch_size: int = -1
    train_micro_batch_size: int = -1
    microbatch_size: int = -1
    token_budget: int = -1
    pad_microbatches: bool = False

    num_test_batches: int = 5
    eval_batch_size: int = -1
    test_batch_start_index: int = 0
    eval_num_generations: int = 1

    max_prompt_length: int = 512
    max_response_length: int = 1024
    data_shuffle_seed: int | None = 0

    decode_sampling_temperature: float = 1.0
    decode_sampling_top_k: int = 0
    decode_sampling_nucleus_p: float = 1.0

    max_operand: int = 49
    warm_start_steps: int = 1200
    warm_start_accuracy: float = 0.5
    warm_start_batch_size: int = 64
    warm_start_learning_rate: float = 3e-3

    distributed: str = "auto"
    run_name: str = ""
    base_output_directory: str = "runs"
    enable_tensorboard: bool = False
    wandb_project: str | None = None
    log_period: int = 20
    enable_checkpointing: bool = True
    checkpoint_period: int = 50
    async_checkpointing: bool = True
    max_num_checkpoints_to_keep: int | None = 3
    jax_cache_dir: str | None = "~/.cache/rampup"
    eval_interval: int = 50

    learning_rate: float = 1e-3
    lr_schedule_type: str = "constant"
    warmup_steps_fraction: float = 0.0
    warmup_steps: int | None = None
    learning_rate_final_fraction: float = 0.1
    opt_type: str = "adamw"
    skip_nonfinite: int = 3
    adam_b1: float = 0.9
    adam_b2: float = 0.99
    adam_eps: float = 1e-8
    adam_weight_decay: float = 0.0
    gradient_clipping_threshold: float = 1.0

    base_emb_dim: int = 64
    base_num_decoder_layers: int = 2
    base_mlp_dim: int = 256
    base_num_query_heads: int = 4
    base_num_kv_heads: int = -1
    dtype: str = "float32"
    init_weights_seed: int = 0

    num_devices: int = -1
    ici_data_parallelism: int = -1
    ici_fsdp_parallelism: int = 1
    ici_tensor_parallelism: int = 1

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
        "decode_sampling_temperature=0 and decode_sampling_top_k=1 sample greedily, so"
        " that the responses to a prompt are equal: `rampup train` refuses them": (
            config.decode_sampling_temperature == 0 or config.decode_sampling_top_k == 1
        ),
        f"dropped: the last {format_count(dropped, 'prompt')}, too few for"
        f" batch_size={config.batch_size:,}": dropped and not grows,
        f"left out: the last {format_count(lost, 'prompt')} of an evaluation, too few"
        f" for a batch of {config.eval_batch:,}": evaluated and lost,
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
