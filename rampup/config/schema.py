"""Every configuration key, once: default, kind, unit, limits and one line of documentation.

Names and meanings are MaxText's wherever MaxText has the key. The defaults are the values of configs/base.yml, except that
the ramp is off here and on there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from rampup.config.key import Key, Settings, key
from rampup.errors import ConfigError, RampupError
from rampup.plan.numbers import divisors, nearest_in

_run = partial(key, section="Run")
_batch = partial(key, section="Batch")
_ramp = partial(key, section="Ramp")
_devices = partial(key, section="Devices", minimum=1, also=(-1,), unit="devices")
_pipeline = partial(key, section="Pipeline")
_rate = partial(key, section="Learning rate")
_optimizer = partial(key, section="Optimizer")
_model = partial(key, section="Model")
_data = partial(key, section="Data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Settings):
    """A complete, checked configuration; every attribute is a key of the YAML file.

    Raises:
        ConfigError: a bad value, or keys that contradict each other; all of them at once.

    Example:
        >>> Config(steps=10).steps
        10
    """

    # One line per key, as a table.
    # fmt: off
    run_name: str = _run("", "folder of the run in base_output_directory; a name resumes, an empty one makes a new folder", kind="name")
    base_output_directory: str = _run("runs", "where run folders are made", maxtext='""')
    steps: int = _run(500, "optimizer steps of the run; -1 = learning_rate_schedule_steps", minimum=1, also=(-1,), unit="steps", maxtext="150_001")
    enable_tensorboard: bool = _run(False, "also write every metric for TensorBoard, into the run's folder; needs rampup[tensorboard]", maxtext="true")
    wandb_project: str | None = _run(None, "also log every metric to this project of Weights & Biases; needs rampup[wandb]", kind="text", nullable=True, own=True)
    log_period: int = _run(20, "steps between printed lines where there is no progress bar", minimum=1, unit="steps", maxtext="100", per_process=True)
    enable_checkpointing: bool = _run(True, "whether checkpoints are written at all")
    checkpoint_period: int = _run(100, "steps between checkpoints", minimum=1, unit="steps", maxtext="10_000")
    async_checkpointing: bool = _run(True, "write checkpoints in the background while training goes on")
    on_checkpoint_error: str = _run("stop", "what to do when the disk takes no more: stop = end the run; continue = say so, keep the checkpoints that are there and try again at the next; several processes always stop", choices=("stop", "continue"), own=True)
    max_num_checkpoints_to_keep: int | None = _run(3, "older checkpoints are deleted; null keeps all", kind="int", minimum=1, nullable=True, maxtext="None")
    jax_cache_dir: str | None = _run("~/.cache/rampup", "where compiled programs are kept, so that a restart compiles nothing; null keeps none; the environment's JAX_COMPILATION_CACHE_DIR wins", nullable=True, maxtext="~/jax_cache", per_process=True)
    on_plan_change: str = _run("refuse", "what to do where a run goes on with another ramp than its checkpoint's: refuse, or continue_by_samples with the new sizes from the samples consumed so far", choices=("refuse", "continue_by_samples"), own=True)
    eval_interval: int = _run(100, "steps between evaluations; -1 = never", minimum=1, also=(-1,), unit="steps", maxtext="-1")
    eval_steps: int = _run(8, "evaluation batches per evaluation; -1 = all held-out rows that fill a batch", minimum=1, also=(-1,), maxtext="-1")

    per_device_batch_size: Fraction = _batch(Fraction(16), "samples per device and accumulation step after the ramp; may be a fraction where tensor or pipeline axes share a sample", above=0, unit="samples", maxtext="12.0", ramp=True, per_accumulation=True)
    eval_per_device_batch_size: Fraction = _batch(Fraction(0), "the same for evaluation; 0 = per_device_batch_size", minimum=0, unit="samples")
    gradient_accumulation_steps: int = _batch(1, "a factor of every global batch: devices * per_device_batch_size * this", minimum=1, ramp=True)
    gradient_accumulation: str = _batch("fused", "how passes are accumulated: fused = one executable, one optimizer run and one gradient reduction per step, weighted by tokens; multi_steps = optax.MultiSteps", choices=("fused", "multi_steps"), own=True, identity=True)
    rampup_microbatch: str = _batch("fixed", "what absorbs the ramp: fixed = more passes, one compiled shape; per_phase = a larger microbatch, one shape a phase; auto = fixed, then the largest microbatch in the last phase, two shapes", choices=("fixed", "per_phase", "auto"), own=True)
    microbatch_size: int = _batch(-1, "samples per replica and forward pass; -1 = the largest that divides every phase", minimum=1, also=(-1,), unit="samples", own=True)
    expansion_factor_real_data: Fraction = _batch(Fraction(-1), "above 1, only 1 of this many hosts loads data, for itself and the others; -1 = every host loads", above=0, also=(-1,))

    enable_rampup_batch_size: bool = _ramp(False, "grow the batch linearly with the keys below", ramp=True)
    per_device_batch_size_start: Fraction = _ramp(Fraction(4), "samples per device in the first phase", above=0, unit="samples", ramp=True, per_accumulation=True)
    per_device_batch_size_increment: Fraction = _ramp(Fraction(4), "growth per phase", above=0, unit="samples", maxtext="2.0", ramp=True, per_accumulation=True)
    global_rampup_samples: int = _ramp(1600, "samples that the whole ramp is asked to take", minimum=1, unit="samples", maxtext="500", ramp=True)
    rampup_carry_overshoot: bool = _ramp(False, "what happens to samples beyond a threshold: false = each phase counts from zero, as in MaxText; true = thresholds count over the whole run, as in Megatron", own=True, ramp=True)
    batch_size_schedule: str | None = _ramp(None, 'any other ramp: "0:768 250B:1536 500B:3072" = THRESHOLD:GLOBAL_BATCH_SIZE from 0 on; sizes may decrease', kind="text", nullable=True, own=True, ramp=True)
    batch_size_schedule_unit: str = _ramp("samples", "what its thresholds count: samples, or tokens, which are divided by max_target_length", choices=("samples", "tokens"), own=True, ramp=True)

    num_devices: int = _devices(-1, "devices that the plan is for; -1 = those of this machine", own=True)
    num_slices: int = _devices(-1, "slices that the dcn axes connect; -1 = as many as those axes imply", unit="slices")
    coordinator_address: str | None = _devices(None, "host:port of process 0, for several processes; null = as the launcher says", kind="text", nullable=True, minimum=None, also=(), unit=None, own=True)
    num_processes: int = _devices(-1, "processes that train together; -1 = as the launcher says", unit=None, own=True)
    process_id: int = _devices(-1, "number of this process, from 0; -1 = as the launcher says", minimum=0, unit=None, own=True, per_process=True)
    jax_distributed_initialization_timeout: int = _devices(300, "how long the processes wait for each other at the start", also=(), unit="seconds")
    jax_distributed_heartbeat_timeout_seconds: int = _devices(60, "silence after which the other processes give one up and end", also=(), unit="seconds", maxtext="100")
    ici_data_parallelism: int = _devices(-1, "devices per slice that hold copies of the model; gradients are reduced once per step over this axis", maxtext="1")
    ici_fsdp_parallelism: int = _devices(1, "devices per slice that share parameters and cut the batch; saves memory, reduces in every pass", maxtext="-1")
    ici_tensor_parallelism: int = _devices(1, "devices per slice that share each layer's matrices")
    ici_context_parallelism: int = _devices(1, "devices per slice that share each sequence; planned only")
    ici_expert_parallelism: int = _devices(1, "devices per slice that share experts; planned only")
    ici_pipeline_parallelism: int = _devices(1, "pipeline stages per slice")
    dcn_data_parallelism: int = _devices(-1, "slices that hold copies of the model")
    dcn_fsdp_parallelism: int = _devices(1, "slices that share parameters")
    dcn_tensor_parallelism: int = _devices(1, "slices that share each layer's matrices")
    dcn_context_parallelism: int = _devices(1, "slices that share each sequence; planned only")
    dcn_expert_parallelism: int = _devices(1, "slices that share experts; planned only")
    dcn_pipeline_parallelism: int = _devices(1, "factor of the pipeline stages across slices")

    num_pipeline_microbatches: int = _pipeline(-1, "microbatches of one pipeline pass; -1 = automatic: the largest microbatch, or by pipeline_tick_overhead")
    num_layers_per_pipeline_stage: int = _pipeline(1, "layers in one stage and repeat; -1 = those of the repeats with the lowest predicted step time", unit="layers")
    num_pipeline_repeats: int = _pipeline(-1, "times that each microbatch goes round the stages; -1 = as the layers give")
    pipeline_delay_activation_forwarding: bool = _pipeline(False, "MaxText's key: needs twice the microbatches")
    pipeline_tick_overhead: float | None = _pipeline(None, "what a pipeline tick costs beside its arithmetic, in samples per replica; with it the automatic microbatches are those with the lowest predicted step time; null = not measured", kind="float", minimum=0, nullable=True, unit="samples", own=True)
    pipeline_keep: str = _pipeline("nothing", "what a stage keeps of a microbatch for its backward besides its input: nothing, so that it computes it again, or dots = matrix products", choices=("nothing", "dots"), own=True)
    pipeline_strict_multiple: bool = _pipeline(True, "keep MaxText's rule that microbatches are a multiple of the stages", own=True)

    learning_rate: float = _rate(3e-3, "peak learning rate, for the batch of the last phase", minimum=0, maxtext="3.e-5")
    lr_schedule_type: str = _rate("cosine", "what follows the warm-up: cosine decay; wsd = stay, then decay; or constant", choices=("cosine", "wsd", "constant"))
    learning_rate_schedule_steps: int = _rate(-1, "length of the schedule; -1 = steps; the learning rate is 0 after it", minimum=1, also=(-1,), unit="steps")
    warmup_steps_fraction: float = _rate(0.1, "share of the schedule in which the learning rate rises from 0", minimum=0, maximum=1)
    learning_rate_final_fraction: float = _rate(0.1, "learning rate at the end of the schedule over its peak", minimum=0, maximum=1)
    wsd_decay_steps_fraction: float = _rate(0.1, "share of the schedule in which wsd decays", minimum=0, maximum=1)
    wsd_decay_style: str = _rate("linear", "how wsd decays: linear or cosine", choices=("linear", "cosine"))
    learning_rate_clock: str = _rate("samples", "what the schedule counts: samples keep warm-up and decay where they belong in the data when the batch changes, steps do not", choices=("steps", "samples"), maxtext="steps", own=True)
    learning_rate_batch_scaling: str = _rate("none", "how the learning rate follows batch / final batch: none, sqrt (Adam) or linear (SGD)", choices=("none", "sqrt", "linear"), own=True)

    opt_type: str = _optimizer("adamw", "the optimizer: adamw or sgd", choices=("adamw", "sgd"), identity=True)
    skip_nonfinite: int = _optimizer(3, "a step whose loss or gradient is not finite changes nothing; so many of them in a row stop the run; 0 = not checked", minimum=0, unit="steps", own=True)
    adam_b1: float = _optimizer(0.9, "decay of the first moment", minimum=0, below=1)
    adam_b2: float = _optimizer(0.95, "decay of the second moment", minimum=0, below=1)
    adam_eps: float = _optimizer(1e-8, "added to the denominator", above=0)
    adam_weight_decay: float = _optimizer(0.1, "decoupled weight decay", minimum=0)
    gradient_clipping_threshold: float = _optimizer(1.0, "largest global norm of the gradient; 0 = no limit", minimum=0)

    base_emb_dim: int = _model(128, "width of the model", minimum=1, maxtext="2048", identity=True)
    base_num_decoder_layers: int = _model(4, "layers", minimum=1, unit="layers", maxtext="16", identity=True)
    base_mlp_dim: int = _model(512, "width of the feed-forward part", minimum=1, maxtext="7168", identity=True)
    base_num_query_heads: int = _model(4, "attention heads", minimum=1, maxtext="16", identity=True)
    base_num_kv_heads: int = _model(-1, "heads of keys and values; -1 = base_num_query_heads", minimum=1, also=(-1,), maxtext="16", identity=True)
    vocab_size: int = _model(256, "different tokens; 256 for bytes", minimum=2, unit="tokens", maxtext="32_000", identity=True)
    max_target_length: int = _model(128, "tokens per sample", minimum=1, unit="tokens", maxtext="2048", identity=True)
    logits_via_embedding: bool = _model(False, "use the embedding as output layer too", identity=True)
    dropout_rate: float = _model(0.0, "share of activations dropped in training", minimum=0, below=1)
    dtype: str = _model("float32", "type of activations: float32 or bfloat16; weights and accumulators stay float32", choices=("float32", "bfloat16"), maxtext="bfloat16")
    remat_policy: str = _model("none", "what the backward pass computes again to save memory: none, minimal = all but matrix products, full = everything", choices=("none", "minimal", "full"), maxtext="full")
    parameter_memory_host_offload: bool = _model(False, "keep the parameters in host memory between steps, and copy them to the devices in each")
    optimizer_memory_host_offload: bool = _model(False, "keep the optimizer's state there; `rampup tune` says what each saves")
    init_weights_seed: int = _model(0, "seed of the initial weights and of dropout", minimum=0, maximum=2**31 - 1, identity=True)

    dataset_type: str = _data("text", "what the data are: text = bytes of text files; tokens = .npy or .bin arrays; arrayrecord = one row a record; synthetic = made up", choices=("text", "tokens", "arrayrecord", "synthetic"), maxtext="synthetic", identity=True)
    grain_train_files: str | None = _data(None, "files, as a glob pattern; null with text = the Python standard library's own source", kind="text", nullable=True, maxtext="''")
    grain_eval_files: str | None = _data(None, "files for evaluation; null = hold out a part of the training files", kind="text", nullable=True, maxtext="''")
    eval_holdout_fraction: float = _data(0.05, "share of the training data held out where grain_eval_files is null", above=0, below=1, own=True)
    token_dtype: str = _data("uint16", "type of the tokens in .bin and ArrayRecord files, little-endian", choices=("uint8", "uint16", "int32", "uint32"), own=True)
    num_epoch: int = _data(-1, "passes over the training rows; -1 = as many as steps need", minimum=1, also=(-1,), maxtext="1")
    enable_data_shuffling: bool = _data(True, "a new order of rows in every epoch", identity=True)
    data_shuffle_seed: int = _data(0, "seed of that order", minimum=0, maximum=2**31 - 1, identity=True)
    grain_num_threads: int = _data(2, "threads that read ahead", minimum=1, maximum=1024, maxtext="16")
    grain_prefetch_buffer_size: int = _data(4, "batches read ahead", minimum=1, maximum=100_000, unit="batches", maxtext="500")

    # fmt: on

    def differences(self, other: Config) -> dict[str, dict[str, Any]]:
        """Return the keys in which two configurations differ, each with its value here, `a`, and there, `b`.

        Example:
            >>> Config(steps=10).differences(Config(steps=20))
            {'steps': {'a': 10, 'b': 20}}
        """
        a, b = self.to_dict(), other.to_dict()
        return {name: {"a": a[name], "b": b[name]} for name in KEYS if a[name] != b[name]}

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.learning_rate_schedule_steps if self.steps == -1 else self.steps

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.base_num_query_heads if self.base_num_kv_heads == -1 else self.base_num_kv_heads

    def _contradictions(self) -> list[RampupError]:
        heads, width, warmup = self.base_num_query_heads, self.base_emb_dim, self.warmup_steps_fraction
        rules: list[tuple[bool, str, str, Sequence[object]]] = [
            (
                self.total_steps != -1,
                "steps",
                "steps=-1 takes learning_rate_schedule_steps, which is -1 too; set one of them",
                (),
            ),
            (
                self.lr_schedule_type != "wsd" or warmup + self.wsd_decay_steps_fraction <= 1,
                "wsd_decay_steps_fraction",
                f"warmup_steps_fraction + wsd_decay_steps_fraction = {warmup} + "
                f"{self.wsd_decay_steps_fraction} must not exceed 1",
                (float(1 - Fraction(repr(warmup))),),
            ),
            (
                width % (2 * heads) == 0,
                "base_num_query_heads",
                f"base_emb_dim={width} must be a multiple of 2 * base_num_query_heads = {2 * heads}, so that every head has an "
                "even width",
                _nearest_divisors(heads, width // 2 if width % 2 == 0 else 0),
            ),
            (
                heads % self.num_kv_heads == 0,
                "base_num_kv_heads",
                f"base_num_query_heads={heads} must be a multiple of base_num_kv_heads={self.num_kv_heads}",
                _nearest_divisors(self.num_kv_heads, heads),
            ),
            (
                self.dataset_type != "text" or self.vocab_size >= 256,
                "vocab_size",
                f"vocab_size={self.vocab_size} must be at least 256 for dataset_type=text, whose tokens are bytes",
                (256,),
            ),
            (
                self.dataset_type not in ("tokens", "arrayrecord") or self.grain_train_files is not None,
                "grain_train_files",
                f"dataset_type={self.dataset_type} needs grain_train_files, a glob pattern of the files to read",
                (),
            ),
        ]
        return [ConfigError(message, key=name, nearest=nearest) for holds, name, message, nearest in rules if not holds]


def _nearest_divisors(value: int, total: int) -> list[int]:
    return nearest_in(value, divisors(total))


KEYS = Config.keys()
# A checkpoint belongs to a run only if these agree: they define the meaning of its arrays and the order of the data.
IDENTITY_KEYS = tuple(name for name, spec in KEYS.items() if spec.identity)
RAMP_KEYS = tuple(name for name, spec in KEYS.items() if spec.ramp)
PER_PROCESS_KEYS = tuple(name for name, spec in KEYS.items() if spec.per_process)
PER_ACCUMULATION_KEYS = tuple(name for name, spec in KEYS.items() if spec.per_accumulation)

# Names under which other systems have a key. An error about an unknown key suggests the name here; none of them is accepted.
ALIASES: dict[str, str] = {
    "run_name": "name experiment experiment_name exp_name",
    "base_output_directory": "output_dir out_dir save_dir log_dir logdir checkpoint_dir work_dir workdir output_directory save",
    "steps": "max_steps num_steps train_steps num_train_steps total_steps train_iters max_iters iterations",
    "enable_tensorboard": "tensorboard tensorboard_dir",
    "wandb_project": "wandb project",
    "log_period": "log_interval log_every log_every_n_steps logging_steps log_freq",
    "checkpoint_period": "save_interval save_every save_steps checkpoint_interval checkpoint_every save_freq ckpt_interval",
    "max_num_checkpoints_to_keep": "save_total_limit max_checkpoints keep_checkpoints max_to_keep keep_last",
    "eval_interval": "eval_every eval_freq eval_period val_interval val_check_interval",
    "eval_steps": "eval_iters num_eval_steps val_steps",
    "per_device_batch_size": "batch_size global_batch_size train_batch_size batch bs per_device_train_batch_size",
    "eval_per_device_batch_size": "eval_batch_size val_batch_size per_device_eval_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accum_steps accumulation_steps accumulate_grad_batches",
    "microbatch_size": "micro_batch_size mbs micro_batch micro_batch_size_per_gpu",
    "enable_rampup_batch_size": "rampup ramp_up batch_rampup",
    "batch_size_schedule": "rampup_batch_size batch_schedule global_batch_size_schedule",
    "num_devices": "num_gpus n_gpus gpus devices world_size",
    "ici_data_parallelism": "dp data_parallel data_parallel_size",
    "ici_fsdp_parallelism": "fsdp fsdp_size zero_stage",
    "ici_tensor_parallelism": "tp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "ici_context_parallelism": "cp context_parallel context_parallel_size",
    "ici_expert_parallelism": "ep expert_parallel expert_parallel_size",
    "ici_pipeline_parallelism": "pp pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size num_stages",
    "num_pipeline_microbatches": "num_microbatches num_micro_batches",
    "learning_rate": "lr max_lr peak_lr base_lr peak_learning_rate",
    "lr_schedule_type": "lr_schedule lr_scheduler lr_scheduler_type scheduler lr_decay_style learning_rate_schedule",
    "learning_rate_schedule_steps": "lr_decay_iters lr_decay_steps decay_steps",
    "warmup_steps_fraction": "warmup warmup_steps warmup_ratio lr_warmup lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "learning_rate_final_fraction": "min_lr final_lr end_lr min_lr_ratio",
    "opt_type": "optimizer optim optimizer_type",
    "adam_b1": "beta1 beta_1 adam_beta1",
    "adam_b2": "beta2 beta_2 adam_beta2",
    "adam_eps": "eps epsilon adam_epsilon",
    "adam_weight_decay": "weight_decay wd decay",
    "gradient_clipping_threshold": "grad_clip clip_grad max_grad_norm clip_norm grad_norm_clip gradient_clipping gradient_clip_val",
    "base_emb_dim": "hidden_size hidden_dim d_model dim emb_dim embed_dim n_embd model_dim width",
    "base_num_decoder_layers": "num_layers n_layers n_layer layers depth num_hidden_layers",
    "base_mlp_dim": "mlp_dim d_ff ffn_dim ffn_hidden_size intermediate_size",
    "base_num_query_heads": "num_heads n_heads n_head heads num_attention_heads",
    "base_num_kv_heads": "num_kv_heads n_kv_heads num_key_value_heads num_query_groups",
    "vocab_size": "vocab vocabulary_size n_vocab padded_vocab_size",
    "max_target_length": "seq_len seq_length seqlen sequence_length max_seq_len max_seq_length max_length context_length block_size",
    "logits_via_embedding": "tie_embeddings tie_word_embeddings tied_embeddings",
    "dropout_rate": "dropout hidden_dropout",
    "dtype": "precision compute_dtype bf16 fp16 mixed_precision",
    "remat_policy": "remat gradient_checkpointing activation_checkpointing recompute_granularity",
    "init_weights_seed": "seed random_seed rng_seed",
    "data_shuffle_seed": "seed shuffle_seed data_seed",
    "dataset_type": "dataset data data_type",
    "grain_train_files": "train_files train_data data_path dataset_path train_data_path train_file data_dir",
    "grain_eval_files": "eval_files eval_data val_data valid_data validation_file",
    "eval_holdout_fraction": "val_split validation_split test_size",
    "num_epoch": "epochs num_epochs max_epochs num_train_epochs n_epochs epoch",
    "enable_data_shuffling": "shuffle shuffle_data",
    "grain_num_threads": "num_workers num_threads dataloader_num_workers workers",
    "grain_prefetch_buffer_size": "prefetch prefetch_factor prefetch_size",
}


def keys_for_alias(name: str, keys: Mapping[str, Key] = KEYS) -> tuple[str, ...]:
    """Return the keys that other systems call by a name.

    Example:
        >>> keys_for_alias("lr"), keys_for_alias("seed"), keys_for_alias("steps")
        (('learning_rate',), ('init_weights_seed', 'data_shuffle_seed'), ())
    """
    word = name.lower().replace("-", "_")
    return tuple(key for key, aliases in ALIASES.items() if key in keys and word in aliases.split())
