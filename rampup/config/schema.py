"""The configuration keys: default, type, unit, limits and documentation of each.

Names and meanings are MaxText's if MaxText has the key. The defaults are the values of
configs/base.yml.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

from rampup.config.key import Settings, key
from rampup.config.rules import LINEAR, auto_implies, contradictions
from rampup.errors import RampupError
from rampup.plan.hyperparameters import BATCH_RULES, AdamScaling
from rampup.plan.learning_rate import BATCH_SCALING, CLOCKS, BatchScaling, Clock
from rampup.plan.ramp_keys import AUTO_SCHEDULE, SCHEDULE_UNITS
from rampup.plan.split import RAMPUP_MICROBATCH, RampupMicrobatch

# A key: its default, its properties, and its documentation, where a line break counts
# as a space.
_run = partial(key, section="Run")
_batch = partial(key, section="Batch")
_ramp = partial(key, section="Ramp")
_devices = partial(key, section="Devices", minimum=1, also=(-1,), unit="devices")
_pipeline = partial(key, section="Pipeline")
_rate = partial(key, section="Learning rate")
_optimizer = partial(key, section="Optimizer")
_model = partial(key, section="Model")
_data = partial(key, section="Data")


# fmt: off
@dataclass(frozen=True, kw_only=True)
class RunKeys(Settings):
    """The keys of the length, folder, checkpoints and evaluations of a run."""

    run_name: str = _run("", kind="name", doc="""
        Folder of the run inside base_output_directory. A run with a name resumes from its last checkpoint; an empty name makes
        a new folder.""")
    base_output_directory: str = _run("runs", "Folder in which the folders of runs are made.", maxtext='""')
    steps: int = _run(1000, minimum=1, also=(-1,), unit="steps", maxtext="150_001",
        instead_of=("train_samples", "train_tokens"), doc="""
        Optimizer steps of the run. -1: as many as train_samples or train_tokens take, or learning_rate_schedule_steps; one of
        them must then be set. If learning_rate_schedule_steps is set too, the run has this many steps.""")
    train_samples: int | None = _run(None, kind="int", minimum=1, nullable=True, unit="samples", own=True, ramp=True,
        instead_of=("steps", "train_tokens"), doc="""
        Samples of the run, instead of steps. The run ends with the first batch that reaches them. null: steps counts.""")
    train_tokens: int | None = _run(None, kind="int", minimum=1, nullable=True, unit="tokens", own=True, ramp=True,
        instead_of=("steps", "train_samples"), doc="""
        Tokens of the run, such as 300B, instead of steps: divided by max_target_length and rounded up, they are train_samples.
        null: steps counts.""")
    enable_tensorboard: bool = _run(False, maxtext="true", doc="""
        Also write every metric to the run's folder for TensorBoard. Needs rampup[tensorboard].""")
    wandb_project: str | None = _run(None, kind="text", nullable=True, own=True, doc="""
        Also log every metric to this project of Weights & Biases. Needs rampup[wandb]. null: do not log.""")
    log_period: int = _run(20, minimum=1, unit="steps", maxtext="100", per_process=True, doc="""
        Steps between printed lines if there is no progress bar.""")
    enable_checkpointing: bool = _run(True, doc="""
        Write checkpoints every checkpoint_period steps and at the end of the run. Without checkpoints a run cannot resume.""")
    checkpoint_period: int = _run(100, minimum=1, unit="steps", maxtext="10_000", doc="""
        Steps between checkpoints, if enable_checkpointing is set.""")
    async_checkpointing: bool = _run(True, "Write checkpoints in the background while training continues.")
    max_num_checkpoints_to_keep: int | None = _run(3, kind="int", minimum=1, nullable=True, maxtext="None", doc="""
        Number of checkpoints to keep; older ones are deleted. null: keep all.""")
    jax_cache_dir: str | None = _run("~/.cache/rampup", nullable=True, maxtext="~/jax_cache", per_process=True, doc="""
        Folder of the compilation cache, so that a restart compiles nothing again. The environment variable
        JAX_COMPILATION_CACHE_DIR wins over this key. null: no cache.""")
    on_plan_change: str = _run("refuse", choices=("refuse", "continue_by_samples"), own=True, doc="""
        What to do if a resumed run has another ramp than its checkpoint. refuse: raise an error with both ramps.
        continue_by_samples: continue with the new batch sizes, looked up by the samples consumed so far.""")
    eval_interval: int = _run(100, minimum=1, also=(-1,), unit="steps", maxtext="-1", doc="""
        Steps between evaluations. -1: never evaluate.""")
    eval_steps: int = _run(8, minimum=1, also=(-1,), maxtext="-1", doc="""
        Batches per evaluation at most; fewer if fewer rows are held out. -1: all held-out rows that fill a batch.""")


@dataclass(frozen=True, kw_only=True)
class BatchKeys(Settings):
    """The keys that a plan's batches depend on: batch, ramp, devices, mesh axes and
    pipeline.
    """

    per_device_batch_size: Fraction = _batch(Fraction(8), above=0, unit="samples", maxtext="12.0", ramp=True,
        doc="""Samples per device and accumulation step, after the ramp if there is one. The global batch is num_devices *
        per_device_batch_size * gradient_accumulation_steps. May be a fraction if tensor or pipeline parallelism shares a sample
        between devices. Not used with batch_size_schedule.""")
    eval_per_device_batch_size: Fraction = _batch(Fraction(0), minimum=0, unit="samples", doc="""
        Samples per device in an evaluation batch. 0: per_device_batch_size, or with batch_size_schedule the last scheduled
        batch without gradient_accumulation_steps.""")
    gradient_accumulation_steps: int = _batch(1, minimum=1, ramp=True, doc="""
        Factor of every global batch, and without a pipeline the minimum number of accumulation steps: the global batch is
        num_devices * per_device_batch_size * gradient_accumulation_steps. Must divide the batches of a batch_size_schedule.""")
    gradient_accumulation: str = _batch("fused", choices=("fused", "multi_steps"), own=True, identity=True, doc="""
        How gradients are accumulated. fused: one program per optimizer step, with one gradient reduction and token-weighted
        means. multi_steps: optax.MultiSteps, with one program per accumulation step.""")
    rampup_microbatch: RampupMicrobatch = _batch("fixed", choices=RAMPUP_MICROBATCH, own=True, doc="""
        What grows with the batch. fixed: the number of accumulation steps, so that the run compiles one shape. per_phase: the
        microbatch, with one compiled shape per phase. auto: as fixed during the ramp, then the largest microbatch in the last
        phase, with two compiled shapes. whole: every batch is one microbatch, and the loss sees all its rows, as a contrastive
        loss or normalization over the batch has to; each batch size compiles its own program, which the run waits for, and a
        step needs the memory of its whole batch. It needs gradient_accumulation=fused and gradient_accumulation_steps=1, and no
        pipeline.""")
    microbatch_size: int = _batch(-1, minimum=1, also=(-1,), unit="samples", own=True, doc="""
        Samples per data-parallel replica and forward pass. Must divide global batch / (data and fsdp parallelism) in every
        phase. -1: the largest size that rampup_microbatch and gradient_accumulation_steps allow.""")
    measure_gradient_noise: bool = _batch(False, own=True, doc="""
        Measure the gradient noise scale in every step: how large a batch is before a larger one stops paying. It compares
        the microbatches of all replicas, so a step needs at least two; an automatic microbatch_size is made small
        enough. Adds noise_scale_samples and others to the metrics. Needs gradient_accumulation=fused.""")
    gradient_noise_half_life_samples: int = _batch(-1, minimum=1, also=(-1,), unit="samples", own=True, doc="""
        Samples after which a step counts half in the average of measure_gradient_noise. -1: a twentieth of the samples of the
        run, but at least 30 of its largest batches; with batch_size_schedule=auto, of its first.""")
    expansion_factor_real_data: Fraction = _batch(Fraction(-1), above=0, also=(-1,), doc="""
        If above 1, one of this many hosts loads data, for itself and the others. Between 0 and 1, MaxText's setting to resume
        on fewer chips, only for plans: the loaders of the former hosts take turns, and a step gets the rows of this share of
        them. `rampup plan` prints the rows of a step, the global batch times this factor, as global_batch_to_load. -1: every
        host loads its own data.""")

    enable_rampup_batch_size: bool = _ramp(True, maxtext="false", ramp=True, doc="""
        Grow the batch linearly: from per_device_batch_size_start by per_device_batch_size_increment to per_device_batch_size,
        over global_rampup_samples samples. Excludes batch_size_schedule. Must be set, even to true, if another key of the ramp
        is; else, false if per_device_batch_size or batch_size_schedule is set.""")
    per_device_batch_size_start: Fraction = _ramp(Fraction(2), above=0, unit="samples", ramp=True,
        doc="""Samples per device in the first phase of the linear ramp (enable_rampup_batch_size).""")
    per_device_batch_size_increment: Fraction = _ramp(Fraction(2), above=0, unit="samples", ramp=True,
        doc="""Growth per phase of the linear ramp, in samples per device. Must divide per_device_batch_size -
        per_device_batch_size_start.""")
    global_rampup_samples: int = _ramp(3000, minimum=1, unit="samples", maxtext="500", ramp=True, doc="""
        Samples over which the linear ramp grows the batch, divided equally between its increments. Each phase takes whole
        steps, and at least one, so the ramp can consume up to a batch more per phase.""")
    rampup_carry_overshoot: bool = _ramp(False, own=True, ramp=True, doc="""
        How samples beyond a threshold of the linear ramp count. false: every phase counts from zero, as in MaxText. true:
        thresholds count from the start of the run, as in Megatron-LM, so the ramp ends within one batch of
        global_rampup_samples.""")
    batch_size_schedule: str | None = _ramp(None, kind="text", nullable=True, own=True, ramp=True, doc="""
        Any other ramp, as THRESHOLD:GLOBAL_BATCH_SIZE pairs from 0 on: "0:768 250B:1536 500B:3072". A threshold can be a share
        of train_samples or train_tokens: "0:256 3%:512 10%:1024". Sizes may decrease, and include gradient_accumulation_steps.
        Wins over per_device_batch_size; excludes enable_rampup_batch_size. auto: the batch grows from
        per_device_batch_size_start to per_device_batch_size, with the gradient noise scale that the run measures;
        the run ends with the first batch that reaches train_samples or train_tokens, or after steps. It sets
        enable_rampup_batch_size=false, measure_gradient_noise=true and the learning_rate_clock of the run's length, samples or
        steps. That overrides base files; another value beside it is an error. null: no schedule.""")
    auto_max_waste: float = _ramp(0.2, above=0, below=1, own=True, doc="""
        Share of each sample that a batch may lose for batch_size_schedule=auto to grow to it, by the lower end N of the noise
        scale's interval: B / (N + B). 0.2 lets a batch of 8 follow from a noise scale of 32 on.""")
    batch_size_schedule_unit: str = _ramp("samples", choices=SCHEDULE_UNITS, own=True, ramp=True, doc="""
        What the thresholds of batch_size_schedule count: samples, or tokens, which are divided by max_target_length.""")

    seesaw_factor: float | None = _ramp(None, kind="float", above=1, nullable=True, own=True, ramp=True, doc="""
        Seesaw: where the learning-rate schedule falls by this factor a, the learning rate falls by sqrt(a) and the batch grows
        by a, so that the run needs fewer steps for the same samples; with opt_type sgd, the batch takes the whole cut. The
        decay becomes a staircase. If steps is set, the run has the samples that these steps would have without Seesaw. Needs
        learning_rate_clock=samples. null: off.""")
    seesaw_max_batch_size: int | None = _ramp(None, kind="int", minimum=1, nullable=True, unit="samples", own=True, ramp=True,
        doc="""Largest global batch that seesaw_factor may reach; beyond it, the learning rate falls by the whole factor.
        Batches that grow are rounded down to sizes that can be split. null: no limit.""")

    num_devices: int = _devices(-1, own=True, doc="""
        Devices to plan for. -1: the devices of this machine. Training always uses the devices that JAX finds.""")
    num_slices: int = _devices(-1, unit="slices", doc="""
        Slices that the dcn axes connect. -1: as many as the ici and dcn axes imply.""")
    distributed: str = _devices("auto", choices=("auto", "on", "off"), minimum=None, also=(), unit=None, own=True, doc="""
        Whether this process joins others. auto: if a launcher or the next three keys say that it is one of several. on: always;
        one that was started alone is refused. off: never.""")
    coordinator_address: str | None = _devices(None, kind="text", nullable=True, minimum=None, also=(), unit=None, own=True,
        doc="""Address (host:port) of process 0, for multi-process runs. null: taken from the launcher's environment.""")
    num_processes: int = _devices(-1, unit=None, own=True, doc="""
        Number of processes of the run. -1: taken from the launcher's environment.""")
    process_id: int = _devices(-1, minimum=0, unit=None, own=True, per_process=True, doc="""
        Index of this process, from 0. -1: taken from the launcher's environment.""")
    jax_distributed_heartbeat_timeout_seconds: int = _devices(60, also=(), unit="seconds", maxtext="100", doc="""
        Seconds without a heartbeat after which the remaining processes exit.""")
    ici_data_parallelism: int = _devices(-1, maxtext="1", doc="""
        Devices per slice along the data axis, which replicates the model; gradients are reduced over it once per optimizer
        step. -1: the remaining devices of the slice. At most one ici axis may be -1, and the ici axes multiply to the devices
        of a slice.""")
    ici_fsdp_parallelism: int = _devices(1, maxtext="-1", doc="""
        Devices per slice along the fsdp axis, which shards parameters and batch. Saves memory, but communicates in every
        accumulation step. -1: the remaining devices.""")
    ici_tensor_parallelism: int = _devices(1, doc="""
        Devices per slice along the tensor axis, which shards the matrices of each layer. -1: the remaining devices.""")
    ici_context_parallelism: int = _devices(1, doc="""
        Devices per slice along the context axis, which shards sequences. Plans only: training does not support it.""")
    ici_pipeline_parallelism: int = _devices(1, unit="stages", doc="""
        Pipeline stages per slice. The number of stages is ici_pipeline_parallelism * dcn_pipeline_parallelism.""")
    dcn_data_parallelism: int = _devices(-1, unit="slices", doc="""
        Slices along the data axis, which replicates the model. -1: the remaining slices. At most one dcn axis may be -1, and
        the dcn axes multiply to num_slices.""")
    dcn_pipeline_parallelism: int = _devices(1, unit="slices", doc="""
        Factor of the pipeline stages across slices. The number of stages is ici_pipeline_parallelism *
        dcn_pipeline_parallelism.""")

    num_pipeline_microbatches: int = _pipeline(-1, doc="""
        Microbatches per pipeline pass: a multiple of the stages (see pipeline_strict_multiple). -1: the fewest, with the
        largest microbatch; or those with the lowest predicted step time, if pipeline_tick_overhead is set or rampup_microbatch
        is per_phase.""")
    num_pipeline_repeats: int = _pipeline(-1, doc="""
        Times that each microbatch passes through all stages (interleaved schedule); base_num_decoder_layers must be a multiple
        of stages * num_pipeline_repeats. -1: as often as there are layers, one layer a time.""")
    pipeline_tick_overhead: float | None = _pipeline(None, kind="float", minimum=0, nullable=True, unit="samples", own=True,
        doc="""Measured overhead of one pipeline tick, in samples per replica; an automatic num_pipeline_microbatches then
        minimizes the predicted step time. null: not measured.""")
    pipeline_strict_multiple: bool = _pipeline(True, own=True, doc="""
        Require num_pipeline_microbatches to be a multiple of the stages, as MaxText does.""")


@dataclass(frozen=True, kw_only=True)
class OptimizerKeys(Settings):
    """The keys of the learning rate, the optimizer and its constants."""

    learning_rate: float = _rate(3e-3, minimum=0, maxtext="3.e-5", doc="""
        Peak learning rate, for the batch of the last phase or of batch_scaling_reference. See batch_scaling for other
        batches.""")
    lr_schedule_type: str = _rate("cosine", choices=("cosine", "wsd", "constant"), doc="""
        Schedule after the warm-up. cosine: cosine decay. wsd: constant, then decay in the last wsd_decay_steps_fraction.
        constant: no decay.""")
    learning_rate_schedule_steps: int = _rate(-1, minimum=1, also=(-1,), unit="steps", doc="""
        Length of the learning-rate schedule; after it the learning rate is 0. -1: steps, which must then be set.""")
    warmup_steps_fraction: float = _rate(0.1, minimum=0, maximum=1, instead_of=("warmup_steps",), doc="""
        Fraction of the schedule during which the learning rate rises linearly from 0 to learning_rate.""")
    warmup_steps: int | None = _rate(None, kind="int", minimum=0, nullable=True, unit="steps", own=True,
        instead_of=("warmup_steps_fraction",), doc="""
        Optimizer steps of the warm-up, whatever their batches, instead of warmup_steps_fraction. null: that fraction counts.""")
    learning_rate_final_fraction: float = _rate(0.1, minimum=0, maximum=1, doc="""
        Learning rate at the end of the schedule, as a fraction of learning_rate.""")
    wsd_decay_steps_fraction: float = _rate(0.1, minimum=0, maximum=1, doc="""
        Fraction of the schedule during which the wsd schedule (lr_schedule_type) decays. warmup_steps_fraction +
        wsd_decay_steps_fraction must not exceed 1.""")
    learning_rate_clock: Clock = _rate("samples", choices=CLOCKS, maxtext="steps", own=True, doc="""
        Progress measure of the learning-rate schedule. samples: warm-up and decay keep their place in the data if the batch
        size changes. steps: they keep their steps.""")
    batch_scaling: str = _rate("none", choices=tuple(BATCH_RULES), own=True, identity=True, doc="""
        Published rule by which the learning rate and AdamW's constants follow a batch k times that of batch_scaling_reference;
        what a rule does not name stays. none: everything. linear: learning_rate * k, for SGD (Goyal et al. 2017). sqrt:
        learning_rate * sqrt(k), for Adam. sde: also 1 - k * (1 - b) for adam_b1 and adam_b2, and adam_eps / sqrt(k) (Malladi et
        al. 2022). half_life: adam_b2**k, at most 0.9999, an average over the same number of tokens (Marek et al. 2025).
        timescale: learning_rate * sqrt(k), and adam_weight_decay * k, divided by the factor that the rule or seesaw_factor puts
        on the learning rate, so that batch / (learning rate * weight decay * tokens) stays constant (Wang & Aitchison 2024).
        power_lines: the same for runs of one length; over lengths it falls as tokens**-0.527 (Bergsma et al. 2025). complete:
        sde, with the weight decay of timescale (Mlodozeniec et al. 2025).""")
    learning_rate_batch_scaling: Literal["auto"] | BatchScaling = _rate("auto", choices=("auto", *BATCH_SCALING), own=True,
        doc="""Factor on the learning rate for a batch k times that of batch_scaling_reference: none, sqrt(k) or linear, which
        is k. auto: that of batch_scaling; if that has none and batch_size_schedule=auto, sqrt, or linear for opt_type sgd.""")
    batch_scaling_reference: int | None = _rate(None, kind="int", minimum=1, nullable=True, unit="samples", own=True,
        identity=True, doc="""
        Global batch for which learning_rate and AdamW's constants are given; batch_scaling is relative to it. null: the batch
        of the last phase, before seesaw_factor; with batch_size_schedule=auto, the largest.""")

    opt_type: str = _optimizer("adamw", choices=("adamw", "sgd", "muon"), identity=True, doc="""
        Optimizer: adamw, sgd, or muon: Muon for the matrices of the layers and AdamW for the rest, with updates of AdamW's
        size, so that learning_rate, adam_eps and adam_weight_decay count for both. For Muon, the square-root rule of
        batch_scaling is an assumption. sgd uses none of adam_b1, adam_b2, adam_eps and adam_weight_decay.""")
    skip_nonfinite: int = _optimizer(3, minimum=0, unit="steps", own=True, doc="""
        Number of consecutive steps with a non-finite loss or gradient after which the run stops. Each such step leaves the
        state unchanged. 0: no check.""")
    adam_b1: float = _optimizer(0.9, "Decay rate of AdamW's first moment.", minimum=0, below=1)
    adam_b2: float = _optimizer(0.95, "Decay rate of AdamW's second moment.", minimum=0, below=1)
    adam_eps: float = _optimizer(1e-8, "Term added to AdamW's denominator for numerical stability.", above=0)
    adam_weight_decay: float = _optimizer(0.1, "Decoupled weight decay of AdamW.", minimum=0)
    adam_b2_floor: float | None = _optimizer(None, kind="float", minimum=0, below=1, nullable=True, own=True, identity=True,
        doc="""Smallest value that batch_scaling may give adam_b2. Too low a value for large batches makes losses spike. null:
        no limit.""")
    adam_weight_decay_reference_tokens: int | None = _optimizer(None, kind="int", minimum=1, nullable=True, unit="tokens",
        own=True, identity=True, doc="""
        Tokens of the run for which adam_weight_decay was chosen, with a model of this size. For k times as many tokens,
        batch_scaling divides the weight decay by k (timescale, complete) or by k**0.473 (power_lines). null: those of this
        run.""")
    gradient_clipping_threshold: float = _optimizer(1.0, "Maximum global norm of the gradient. 0: no clipping.", minimum=0)

    mu_dtype: str | None = _optimizer(None, kind="text", choices=("float32", "bfloat16"), nullable=True, maxtext='""', doc="""
        Type in which AdamW stores its first moment: float32 or bfloat16. null: weight_dtype, which the second moment has.""")
    gradient_reduction_dtype: str = _optimizer("float32", choices=("float32", "bfloat16"), own=True, doc="""
        Type in which replicas exchange the gradients of a step over the data axis: float32, or bfloat16 for half the bytes.
        Sums over microbatches have gradient_accumulator_dtype, and fsdp exchanges gradients in dtype.""")
    gradient_accumulator_dtype: str = _optimizer("float32", choices=("float32", "bfloat16"), own=True, doc="""
        Type in which gradients are summed over the microbatches of a step: float32, or bfloat16 for half the memory, with an
        error of the gradient that grows with their number. bfloat16 needs gradient_accumulation fused.""")


@dataclass(frozen=True, kw_only=True)
class ModelKeys(Settings):
    """The keys of the model and its memory."""

    base_emb_dim: int = _model(128, minimum=1, maxtext="2048", identity=True, doc="""
        Embedding width of the model. Must be a multiple of 2 * base_num_query_heads.""")
    base_num_decoder_layers: int = _model(4, "Number of decoder layers.", minimum=1, unit="layers", maxtext="16", identity=True)
    base_mlp_dim: int = _model(512, "Width of the feed-forward layers.", minimum=1, maxtext="7168", identity=True)
    base_num_query_heads: int = _model(4, "Number of attention heads.", minimum=1, maxtext="16", identity=True)
    base_num_kv_heads: int = _model(-1, minimum=1, also=(-1,), maxtext="16", identity=True, doc="""
        Number of key and value heads; must divide base_num_query_heads. -1: base_num_query_heads.""")
    vocab_size: int = _model(256, minimum=2, unit="tokens", maxtext="32_000", identity=True, doc="""
        Number of different tokens. At least 256 for dataset_type text, whose tokens are bytes.""")
    max_target_length: int = _model(128, "Tokens per sample.", minimum=1, unit="tokens", maxtext="2048", identity=True)
    logits_via_embedding: bool = _model(False, "Use the embedding matrix as the output layer too.", identity=True)
    dropout_rate: float = _model(0.0, "Fraction of activations dropped in training.", minimum=0, below=1)
    dtype: str = _model("float32", choices=("float32", "bfloat16"), maxtext="bfloat16", doc="""
        Type of activations: float32 or bfloat16. Gradients are summed in float32.""")
    weight_dtype: str = _model("float32", choices=("float32", "bfloat16"), identity=True, doc="""
        Type of the weights: float32 or bfloat16. An update of less than about 1/256 of a bfloat16 weight is lost.""")
    attention: str = _model("autoselected", choices=("autoselected", "dot_product", "flash"), doc="""
        Attention kernel. dot_product: plain matrix products, with memory that grows with the square of max_target_length.
        flash: JAX's splash attention on TPU, with linear memory, if max_target_length is a multiple of 128, and dot_product
        elsewhere. autoselected: flash where it works.""")
    num_vocab_tiling: int = _model(1, minimum=1, doc="""
        Tiles of the vocabulary in the loss: only one of them has its logits in memory at a time. More tiles take one more
        matrix product. Must divide vocab_size.""")
    remat_policy: str = _model("none", choices=("none", "minimal", "save_dot_except_mlp", "full"), maxtext="full", doc="""
        Activations that the backward pass recomputes to save memory, from the least to the most. none: nothing. minimal:
        everything except matrix products. save_dot_except_mlp: everything except the matrix products of attention. full:
        everything.""")
    shard_optimizer_over_data: bool = _model(False, doc="""
        Shard the optimizer state over the data axis (ZeRO-1): each replica keeps and updates its own part, with one
        reduce-scatter of the gradients and one all-gather of the parameters per step. Needs gradient_accumulation=fused.""")
    init_weights_seed: int = _model(0, minimum=0, maximum=2**31 - 1, identity=True, doc="""
        Seed of the initial weights and of dropout.""")

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.base_num_query_heads if self.base_num_kv_heads == -1 else self.base_num_kv_heads


@dataclass(frozen=True, kw_only=True)
class DataKeys(Settings):
    """The keys of the rows to train and evaluate on."""

    dataset_type: str = _data("text", choices=("text", "tokens", "synthetic"), maxtext="synthetic",
        identity=True, doc="""
        Kind of training data. text: the bytes of text files. tokens: .npy or .bin arrays.
        synthetic: generated rows. tokens needs grain_train_files.""")
    grain_train_files: str | None = _data(None, kind="text", nullable=True, maxtext="''", doc="""
        Training files, as a glob pattern relative to the working directory. null: with dataset_type text, the source of the
        Python standard library.""")
    grain_eval_files: str | None = _data(None, kind="text", nullable=True, maxtext="''", doc="""
        Evaluation files, as a glob pattern. null: hold out a twentieth of the training rows.""")
    token_dtype: str = _data("uint16", choices=("uint8", "uint16", "int32", "uint32"), own=True, doc="""
        Type of the tokens in .bin files, little-endian.""")
    num_epoch: int = _data(-1, minimum=1, also=(-1,), maxtext="1", doc="""
        Passes over the training rows; a run that needs more rows is refused. -1: as many as the run needs.""")
    data_shuffle_seed: int | None = _data(0, kind="int", minimum=0, maximum=2**31 - 1, nullable=True, identity=True, doc="""
        Seed of the order of training rows, a new one in every epoch. null: the order of the files.""")
# fmt: on


# The fields of the last base come first.
@dataclass(frozen=True, kw_only=True)
class Config(DataKeys, ModelKeys, OptimizerKeys, BatchKeys, RunKeys):
    """A complete, checked configuration; every attribute is a key of the YAML file. A
    function takes the group that it needs.

    A ConfigError has all bad values or, if there are none, the contradictions that need
    no plan. `build_plan` finds those that need the devices, such as sizes that cannot be
    split.

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
