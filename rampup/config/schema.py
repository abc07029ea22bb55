"""The configuration keys and their defaults, which are the values of configs/base.yml.

Unit, limits and documentation of each are in `keys.yml`. Names and meanings are MaxText's
if MaxText has the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from rampup.config.key import Settings
from rampup.config.rules import LINEAR, auto_implies, contradictions
from rampup.errors import RampupError
from rampup.plan.hyperparameters import BATCH_RULES, AdamScaling
from rampup.plan.learning_rate import BatchScaling, Clock
from rampup.plan.ramp_keys import AUTO_SCHEDULE
from rampup.plan.split import RampupMicrobatch


@dataclass(frozen=True, kw_only=True)
class RunKeys(Settings):
    """The keys of the length, folder, checkpoints and evaluations of a run."""

    run_name: str = ""
    base_output_directory: str = "runs"
    steps: int = 1000
    train_samples: int | None = None
    train_tokens: int | None = None
    enable_tensorboard: bool = False
    wandb_project: str | None = None
    log_period: int = 20
    enable_checkpointing: bool = True
    checkpoint_period: int = 100
    async_checkpointing: bool = True
    max_num_checkpoints_to_keep: int | None = 3
    jax_cache_dir: str | None = "~/.cache/rampup"
    on_plan_change: str = "refuse"
    eval_interval: int = 100
    eval_steps: int = 8


@dataclass(frozen=True, kw_only=True)
class BatchKeys(Settings):
    """The keys that a plan's batches depend on: batch, ramp, devices, mesh axes and
    pipeline.
    """

    per_device_batch_size: Fraction = Fraction(8)
    eval_per_device_batch_size: Fraction = Fraction(0)
    gradient_accumulation_steps: int = 1
    gradient_accumulation: str = "fused"
    rampup_microbatch: RampupMicrobatch = "fixed"
    microbatch_size: int = -1
    measure_gradient_noise: bool = False
    gradient_noise_half_life_samples: int = -1
    expansion_factor_real_data: Fraction = Fraction(-1)

    enable_rampup_batch_size: bool = True
    per_device_batch_size_start: Fraction = Fraction(2)
    per_device_batch_size_increment: Fraction = Fraction(2)
    global_rampup_samples: int = 3000
    rampup_carry_overshoot: bool = False
    batch_size_schedule: str | None = None
    auto_max_waste: float = 0.2
    batch_size_schedule_unit: str = "samples"

    seesaw_factor: float | None = None
    seesaw_max_batch_size: int | None = None

    num_devices: int = -1
    num_slices: int = -1
    distributed: str = "auto"
    coordinator_address: str | None = None
    num_processes: int = -1
    process_id: int = -1
    jax_distributed_heartbeat_timeout_seconds: int = 60
    ici_data_parallelism: int = -1
    ici_fsdp_parallelism: int = 1
    ici_tensor_parallelism: int = 1
    ici_context_parallelism: int = 1
    ici_pipeline_parallelism: int = 1
    dcn_data_parallelism: int = -1
    dcn_pipeline_parallelism: int = 1

    num_pipeline_microbatches: int = -1
    num_pipeline_repeats: int = -1
    pipeline_tick_overhead: float | None = None
    pipeline_strict_multiple: bool = True


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Settings):
    """The keys of the learning rate, the optimizer and its constants."""

    learning_rate: float = 3e-3
    lr_schedule_type: str = "cosine"
    learning_rate_schedule_steps: int = -1
    warmup_steps_fraction: float = 0.1
    warmup_steps: int | None = None
    learning_rate_final_fraction: float = 0.1
    wsd_decay_steps_fraction: float = 0.1
    learning_rate_clock: Clock = "samples"
    batch_scaling: str = "none"
    learning_rate_batch_scaling: Literal["auto"] | BatchScaling = "auto"
    batch_scaling_reference: int | None = None

    opt_type: str = "adamw"
    skip_nonfinite: int = 3
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    adam_weight_decay: float = 0.1
    adam_b2_floor: float | None = None
    adam_weight_decay_reference_tokens: int | None = None
    gradient_clipping_threshold: float = 1.0

    mu_dtype: str | None = None
    gradient_reduction_dtype: str = "float32"
    gradient_accumulator_dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class ModelKeys(Settings):
    """The keys of the model and its memory."""

    base_emb_dim: int = 128
    base_num_decoder_layers: int = 4
    base_mlp_dim: int = 512
    base_num_query_heads: int = 4
    base_num_kv_heads: int = -1
    vocab_size: int = 256
    max_target_length: int = 128
    logits_via_embedding: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"
    weight_dtype: str = "float32"
    attention: str = "autoselected"
    num_vocab_tiling: int = 1
    remat_policy: str = "none"
    shard_optimizer_over_data: bool = False
    init_weights_seed: int = 0

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return (
            self.base_num_query_heads
            if self.base_num_kv_heads == -1
            else self.base_num_kv_heads
        )


@dataclass(frozen=True, kw_only=True)
class DataKeys(Settings):
    """The keys of the rows to train and evaluate on."""

    dataset_type: str = "text"
    grain_train_files: str | None = None
    grain_eval_files: str | None = None
    token_dtype: str = "uint16"
    num_epoch: int = -1
    data_shuffle_seed: int | None = 0


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class Config(DataKeys, ModelKeys, OptimizerKeys, BatchKeys, RunKeys):
    """A complete, checked configuration; every attribute is a key of the YAML file. A
    function takes the group that it needs.

    A ConfigError has all bad values or, if there are none, the contradictions that need
    no plan. `build_plan` finds those of the ramp, and those that need the devices, such
    as sizes that cannot be split.

    A program of one's own gives it to `build_plan`. Keys of the optimizer, of noise and
    of skipped steps act in `rampup train` alone.

    Args:
        sources: where each value that was set comes from, by key. The other arguments
            are the keys, in `docs/reference/configuration.md` with units and limits.

    Example:
        >>> Config(steps=10).steps
        10
    """

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run, without Seesaw; None if a budget of samples or
        tokens decides, with the ramp.
        """
        if (self.train_samples, self.train_tokens) != (None, None):
            return None
        return self.learning_rate_schedule_steps if self.steps == -1 else self.steps

    @property
    def batch_rule(self) -> tuple[BatchScaling, AdamScaling]:
        """What the rule of `batch_scaling` does to the learning rate and to AdamW's
        constants.
        """
        rate, adam = BATCH_RULES[self.batch_scaling]
        if self.learning_rate_batch_scaling != "auto":
            return self.learning_rate_batch_scaling, adam
        if rate == "none" and self.batch_size_schedule == AUTO_SCHEDULE:
            # A batch that grows by measurement needs a rate that follows it.
            rate = "linear" if self.opt_type == "sgd" else "sqrt"
        return rate, adam

    def _dependent_defaults(self) -> dict[str, Any]:
        # The default ramp ends at the default batch: a batch or a schedule of one's own
        # has no ramp unless it asks for one.
        own_batch = self._given & {"per_device_batch_size", "batch_size_schedule"}
        found: dict[str, Any] = (
            {LINEAR: False} if own_batch and LINEAR not in self._given else {}
        )
        if self.batch_size_schedule == AUTO_SCHEDULE:
            implied = auto_implies(has_budget=self.total_steps is None)
            found |= {
                name: value
                for name, value in implied.items()
                if name not in self._given
            }
        if "steps" not in self._given and self.total_steps is None:
            found["steps"] = -1
        return found

    def _contradictions(self) -> list[RampupError]:
        return [*contradictions(self)]


KEYS = Config.keys()
# A checkpoint belongs to a run only if these agree: they define the meaning of its
# arrays and the order of the data.
IDENTITY_KEYS = tuple(name for name, spec in KEYS.items() if spec.identity)
RAMP_KEYS = tuple(name for name, spec in KEYS.items() if spec.ramp)
PER_PROCESS_KEYS = tuple(name for name, spec in KEYS.items() if spec.per_process)
