"""The byte-level language model that `rampup train` trains.

Data flow: `load_config` -> `build_plan` -> `Run.from_config(config, plan)` -> `run.train()`. The function `train` takes the
configuration, finds the checkpoint to resume from, and does the rest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.config.build import adam_base, adam_scaling, build_plan, hyperparameters, plan_to_resume, ramp_record
from rampup.config.files import run_yaml
from rampup.config.schema import DEFAULTS, IDENTITY_DEFAULTS, PER_PROCESS_KEYS, Config
from rampup.errors import ConfigError, DataError
from rampup.lm.data import sample_order, sources
from rampup.lm.transformer import LanguageModel
from rampup.plan.auto_schedule import AUTO_SCHEDULE, AutoSchedule
from rampup.plan.hyperparameters import adam_constants
from rampup.plan.noise_scale import default_half_life
from rampup.plan.pipeline import stage_layer_order
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.run.accumulate import AccumulatedLoss, LossFn, SummableLoss, random_key
from rampup.run.checkpoint import CheckpointOptions, SavedCheckpoint, find_checkpoint
from rampup.run.compile import enable_compilation_cache
from rampup.run.data.batches import BatchLoader, SampleOrder
from rampup.run.data.files import fingerprints
from rampup.run.data.loading import Loading, shared_sources
from rampup.run.data.sources import RowSource, files_of
from rampup.run.distributed import broadcast_from_process0, check_consistent, is_primary, join, watchdog
from rampup.run.events import OnEvent, RunPlanned, ignore_event
from rampup.run.loop import RAMP_ROWS, EvalOptions, Loop, Summary
from rampup.run.mesh import DATA, BatchAxes, make_mesh, replicated
from rampup.run.metrics import MetricOptions, NoiseAverages
from rampup.run.offload import fetch_offloaded, host_memory_problem, host_shardings
from rampup.run.optimizer import AdamSchedule, LearningRate, optimizer_from_config
from rampup.run.pipeline import permute_layers
from rampup.run.run_folder import CHECKPOINT_FOLDER, as_path, run_folder, write_config
from rampup.run.run_lock import own_run
from rampup.run.state import TrainState, create_state
from rampup.run.step import EvalStep, TrainStep, train_step
from rampup.run.writers import TENSORBOARD_FOLDER, MetricWriter, TensorBoardWriter, WandbWriter, required
from rampup.run.zero import scattered_shardings

# The key of a checkpoint's record for what its ramp is built from; that of an `auto` ramp as it has grown is RAMP_ROWS.
RAMP_RECORD = "ramp_record"


def train(config: Config, on_event: OnEvent = ignore_event) -> Summary:
    """Train the language model as configured, in the run's folder, from its newest checkpoint if there is one.

    Several processes that are started alike train one model together; see `rampup.run.distributed.join`.

    Args:
        config: the configuration.
        on_event: called with every event of the run; see `rampup.run.events`.

    Returns:
        The result of the run.

    Raises:
        RampupError: before any work, if the configuration cannot be run here.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"train takes a Config, not a {type(config).__name__}; read a file with rampup.load_config(PATH)")
    join(
        coordinator_address=config.coordinator_address,
        num_processes=None if config.num_processes == -1 else config.num_processes,
        process_id=None if config.process_id == -1 else config.process_id,
        initialization_timeout=config.jax_distributed_initialization_timeout,
        # At least twice as late as the watchdog, whose message says more than JAX's.
        heartbeat_timeout=2 * config.jax_distributed_heartbeat_timeout_seconds + 20,
    )
    enable_compilation_cache(config.jax_cache_dir)
    # Own the run before its checkpoint is read: a process that is still training would write newer ones. `Run.train` also
    # takes ownership, including of a run that gets its name only there.
    owned = own_run(_named_folder(config), only_existing=True) if config.run_name else contextlib.nullcontext()
    with watchdog(config.jax_distributed_heartbeat_timeout_seconds), owned:
        saved = saved_checkpoint(config)
        ramp = None if saved is None else ramp_before(saved.record)
        num_devices = jax.device_count()
        plan = build_plan(config, num_devices) if ramp is None else plan_to_resume(config, num_devices, ramp)
        return Run.from_config(config, plan, saved).train(on_event)


def saved_checkpoint(config: Config) -> SavedCheckpoint | None:
    """Return the newest checkpoint of the configured run; None for a run without a name, whose folder is new."""
    return find_checkpoint(_named_folder(config) / CHECKPOINT_FOLDER) if config.run_name else None


def _named_folder(config: Config) -> Path:
    return as_path(config.base_output_directory) / config.run_name


def ramp_before(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ramp in a checkpoint's record, as it had grown until then, with `step` and the keys that built it, or None."""
    if RAMP_RECORD not in record:
        return None
    found: dict[str, Any] = record[RAMP_RECORD]
    return {**found, "ramp": record.get(RAMP_ROWS, found["ramp"]), "step": record["step"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """The model, its optimizer and its training step on a mesh: a run without its data and its folder.

    Attributes:
        param_shardings: shardings of the model's parameters.
        layer_order: the order in which the pipeline stages store the layers; checkpoints have them in their natural order.
        tx: the optimizer. A training state is that of `step.tx`, which may wrap it.
    """

    config: Config
    plan: RampPlan
    mesh: Mesh
    model: LanguageModel
    param_shardings: Any
    layer_order: np.ndarray
    loss: LossFn | SummableLoss
    tx: optax.GradientTransformation
    learning_rate: LearningRate
    step: TrainStep

    @classmethod
    def from_config(cls, config: Config, plan: RampPlan, mesh: Mesh) -> Self:
        """Build model, optimizer and training step.

        Raises:
            ConfigError: the mesh does not divide the model, or the devices cannot use host memory as configured.
        """
        _check_host_memory(config, mesh)
        model, splitter = language_model(config).on(mesh), plan.splitter
        rate, loss = learning_rate(config, plan), model_loss(config, model, plan, mesh)
        tx = optimizer(config, rate)
        return cls(
            config=config,
            plan=plan,
            mesh=mesh,
            model=model,
            param_shardings=model.shardings(mesh),
            layer_order=np.array(stage_layer_order(config.base_num_decoder_layers, splitter.num_stages, splitter.num_repeats)),
            loss=loss,
            tx=tx,
            learning_rate=rate,
            step=_train_step(config, loss, tx, plan, mesh),
        )

    def with_batches(self, plan: RampPlan) -> Self:
        """Return this setup with the batches of another plan, of as many stages and repeats; everything else stays."""
        return replace(self, plan=plan, step=_train_step(self.config, self.loss, self.tx, plan, self.mesh))

    def evaluation(self, size: int, num_batches: int) -> tuple[EvalStep, RampPlan]:
        """Return the evaluation step, which is without dropout, and the plan of its batches of `size` rows."""
        plan, model = self.plan, replace(self.model, dropout_rate=0.0)
        options = {"splitter": plan.splitter.for_eval(), "num_devices": plan.num_devices, "axes": plan.axes}
        eval_plan = RampPlan(ramp=BatchRamp.constant(size), total_steps=num_batches, **options)
        return EvalStep(model_loss(self.config, model, plan, self.mesh), self.mesh), eval_plan

    def initial_state(self) -> TrainState:
        """Return the state of step 0."""
        init = jax.jit(lambda key: permute_layers(self.model.init(key), self.layer_order), out_shardings=self.param_shardings)
        params, shards = init(random_key(self.config.init_weights_seed)), self.config.shard_optimizer_over_data
        state = create_state(params, self.step.tx, self.mesh, shard_optimizer_over_data=shards)
        return jax.device_put(state, self._state_shardings(state))

    def state_shapes(self) -> TrainState:
        """Return the shapes, types and shardings of `initial_state`, without allocating it."""
        whole = replicated(self.mesh)

        def shape_of(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        params = jax.tree.map(shape_of, jax.eval_shape(self.model.init, jax.random.key(0)), self.param_shardings)
        # Leaves that mirror a parameter, such as Adam's moments, have its sharding. The others are replicated.
        opt_state = optax.tree.map_params(
            self.step.tx,
            lambda leaf, param: shape_of(leaf, param.sharding),
            jax.eval_shape(self.step.tx.init, params),
            params,
            transform_non_params=lambda leaf: shape_of(leaf, whole),
        )
        if self.config.shard_optimizer_over_data:
            scattered = scattered_shardings(opt_state, self.mesh, BatchAxes.of(self.mesh))
            opt_state = jax.tree.map(shape_of, opt_state, scattered)
        state = TrainState(step=shape_of(np.int32(0), whole), params=params, opt_state=opt_state)
        return jax.tree.map(shape_of, state, self._state_shardings(state))

    def reorder_layers(self, state: TrainState) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return two functions of states like `state`: one puts the layers into their natural order, the other one back.

        Checkpoints have the natural order, so that a run can resume with another number of pipeline stages. Every array keeps
        its sharding, and stays in host or device memory.
        """
        if (self.layer_order == np.arange(len(self.layer_order))).all():
            return lambda state: state, lambda state: state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

        def permutation(order: np.ndarray) -> Callable[[Any], Any]:
            permute: Callable[[Any], Any] = jax.jit(
                lambda state: permute_layers(fetch_offloaded(state, shardings), order), out_shardings=shardings
            )
            return permute

        return permutation(np.argsort(self.layer_order)), permutation(self.layer_order)

    def _state_shardings(self, state: TrainState) -> Any:
        """Return a state's shardings, with the parts that the configuration keeps in host memory there."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        if self.config.parameter_memory_host_offload:
            shardings = shardings.replace(params=host_shardings(state.params))
        if self.config.optimizer_memory_host_offload:
            shardings = shardings.replace(opt_state=host_shardings(state.opt_state))
        return shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the language model: everything from the mesh to the data, ready to train.

    Attributes:
        saved: the checkpoint from which it resumes, or None.
        data: fingerprints of the files with training data.
        evaluation: when to evaluate, and how; None = never.
        writers: see `metric_writers`.
    """

    setup: TrainSetup
    saved: SavedCheckpoint | None
    loader: BatchLoader
    data: Mapping[str, str]
    evaluation: EvalOptions | None
    writers: Callable[[Path, int], list[MetricWriter]]

    @classmethod
    def from_config(cls, config: Config, plan: RampPlan, saved: SavedCheckpoint | None = None) -> Self:
        """Build a run on all devices, and check everything that can be checked. Nothing is written.

        Args:
            config: the configuration.
            plan: its plan, from `build_plan` or, with a checkpoint, `plan_to_resume`.
            saved: the checkpoint from which to resume.

        Raises:
            RampupError: the configuration cannot be run here, or the processes have different configurations or data.
        """
        # Before a process opens data for others, which wait for it.
        check_consistent({name: value for name, value in config.to_dict().items() if name not in PER_PROCESS_KEYS})
        _check_expansion_factor(config)
        setup = TrainSetup.from_config(config, plan, make_mesh(plan.axes))
        loading = Loading(factor=max(int(config.expansion_factor_real_data), 1) if jax.process_count() > 1 else 1)
        train_rows, eval_rows = shared_sources(loading, lambda: sources(config))
        data = _check_data(train_rows, loading)
        # The samples that the run can take: with `batch_size_schedule: auto`, as if the batch were the largest from the start.
        num_samples = max([plan.consumed_samples, *(size * plan.total_steps for size in plan.reserved_sizes)])
        loader = BatchLoader(
            source=train_rows,
            plan=plan,
            mesh=setup.mesh,
            order=sample_order(config, len(train_rows), num_samples),
            split_for=setup.step.split_for,
            # `multi_steps` calls its program once per microbatch.
            chunk_size=1 if config.gradient_accumulation == "multi_steps" else None,
            num_threads=config.grain_num_threads,
            read_ahead=config.grain_prefetch_buffer_size,
            loading=loading,
        )
        return cls(
            setup=setup,
            saved=saved,
            loader=loader,
            data=data,
            evaluation=None if config.eval_interval == -1 else _evaluation(config, setup, eval_rows, loading),
            writers=metric_writers(config),
        )

    def train(self, on_event: OnEvent = ignore_event) -> Summary:
        """Train in the run's folder, to the plan's end or to Ctrl-C or SIGTERM.

        Args:
            on_event: called with every event of the run, in process 0 only.

        Raises:
            RampupError: see `Loop`.
        """
        config = self.setup.config
        on_event = on_event if is_primary() else ignore_event
        name = str(run_folder(config.base_output_directory, config.run_name)) if is_primary() else ""
        folder = as_path(broadcast_from_process0("folder", name))
        with own_run(folder):
            if self.saved is None and find_checkpoint(folder / CHECKPOINT_FOLDER) is not None:
                raise ConfigError(
                    f"{folder} already has a checkpoint: start `rampup train` again, or give it to Run.from_config, to resume",
                    key="run_name",
                )
            return self._train(folder, on_event)

    def _train(self, folder: Path, on_event: OnEvent) -> Summary:
        setup, config, plan = self.setup, self.setup.config, self.setup.plan
        on_event(RunPlanned(plan=plan, folder=folder, devices=jax.devices(), num_parameters=setup.model.num_parameters))
        state = setup.initial_state()
        to_saved, from_saved = setup.reorder_layers(state)
        noise = _noise_averages(config, plan)
        auto = _auto_schedule(config, plan, noise)
        follows = auto is not None and auto.mode == "follow"
        loop = Loop(
            plan=plan,
            step=setup.step,
            batches=self.loader.batches,
            batches_of=lambda other: replace(self.loader, plan=other).batches,
            folder=folder,
            metrics=MetricOptions(
                learning_rate=setup.learning_rate.at,
                tokens_per_sample=config.max_target_length,
                flops_per_sample=setup.model.flops_per_sample(config.max_target_length),
                writers=functools.partial(self.writers, folder),
                skip_nonfinite=config.skip_nonfinite,
                # A ramp that follows the run grows while it runs.
                describe_rows=lambda step: self._describe_rows(step, (auto if follows else plan).ramp),
                noise=noise,
                auto=auto,
            ),
            checkpoints=CheckpointOptions(
                checkpoint_period=config.checkpoint_period if config.enable_checkpointing else None,
                max_to_keep=config.max_num_checkpoints_to_keep,
                async_checkpointing=config.async_checkpointing,
                on_checkpoint_error=config.on_checkpoint_error,  # type: ignore[arg-type]
                identity={"num_rows": len(self.loader.source), "data": self.data, **config.identity()},
                extra_metadata={RAMP_RECORD: ramp_record(config, plan)},
                to_saved=to_saved,
                from_saved=from_saved,
            ),
            evaluation=self.evaluation,
            on_event=on_event,
        )
        saved, ramp = self.saved, None
        if saved is not None:
            known = ramp_before(saved.record)
            ramp = None if known is None else BatchRamp.from_rows(known["ramp"])
            # A version of rampup that did not have a key behaved as its default does.
            saved = replace(saved, record={**IDENTITY_DEFAULTS, **saved.record})
        state, start = loop.restore(state, saved, ramp_before=ramp)
        if is_primary():
            # Only now: a run that is refused must leave the configuration of the run in this folder alone.
            write_config(folder, run_yaml(config, num_devices=plan.num_devices, run_name=folder.name))
        _, summary = loop.train(state, start)
        return summary

    def _describe_rows(self, step: int, ramp: BatchRamp) -> list[str]:
        """Return where each row of a step comes from."""
        rows = self.loader.order.rows(range(ramp.samples_before(step), ramp.samples_before(step + 1))).tolist()
        return [self.loader.source.describe(row) for row in rows]


def _train_step(config: Config, loss: LossFn | SummableLoss, tx: Any, plan: RampPlan, mesh: Mesh) -> TrainStep:
    return train_step(
        loss,
        tx,
        plan,
        mesh,
        engine=config.gradient_accumulation,
        seed=config.init_weights_seed,
        skip_nonfinite=config.skip_nonfinite > 0,
        shard_optimizer_over_data=config.shard_optimizer_over_data,
        wait_for_compilation=config.wait_for_compilation or None,  # None: yes if there are several processes
        measure_gradient_noise=config.measure_gradient_noise,
    )


def _noise_averages(config: Config, plan: RampPlan) -> NoiseAverages | None:
    """Return the averages of the gradient noise, if it is measured."""
    if not config.measure_gradient_noise:
        return None
    half_life = config.gradient_noise_half_life_samples
    return NoiseAverages(default_half_life(plan) if half_life == -1 else half_life)


def _auto_schedule(config: Config, plan: RampPlan, noise: NoiseAverages | None) -> AutoSchedule | None:
    """Return what decides the sizes of `batch_size_schedule: auto`, which needs the noise to be measured."""
    if config.batch_size_schedule != AUTO_SCHEDULE or noise is None:
        return None
    return AutoSchedule(
        sizes=plan.reserved_sizes,
        mode=config.auto_schedule,  # type: ignore[arg-type]
        half_life_samples=noise.half_life_samples,
        rows=plan.ramp.to_rows(),
    )


def language_model(config: Config) -> LanguageModel:
    """Return the model that the configuration describes."""
    return LanguageModel.from_config(
        config,
        vocab_size=config.vocab_size,
        tied=config.logits_via_embedding,
        dropout_rate=config.dropout_rate,
        param_dtype=config.weight_dtype,
        remat_policy=config.remat_policy,
        scan_layers=config.scan_layers,
        attention=config.attention,
        num_vocab_tiling=config.num_vocab_tiling,
    )


def learning_rate(config: Config, plan: RampPlan) -> LearningRate:
    """Return the learning-rate schedule that the configuration describes."""
    if config.batch_size_schedule == AUTO_SCHEDULE:
        # The rate depends on the step alone: it must be the same whenever the batch grows.
        plan = replace(plan, ramp=BatchRamp.constant(plan.reserved_sizes[0]))
    return LearningRate.from_config(
        config,
        plan,
        peak=config.learning_rate,
        decay_fraction=config.wsd_decay_steps_fraction,
        decay_style=config.wsd_decay_style,  # type: ignore[arg-type]
    )


def optimizer(config: Config, rate: LearningRate, run_plan: RampPlan | None = None) -> optax.GradientTransformation:
    """Return the optimizer that the configuration describes; its constants follow the batches of the rate's plan.

    Args:
        config: the configuration.
        rate: the learning rate.
        run_plan: the plan whose length the constants depend on; None = that of the rate.
    """
    scaling, adam = adam_scaling(config, run_plan or rate.plan), None
    if scaling.is_active:
        adam = AdamSchedule(plan=rate.plan, constants=adam_constants(rate.plan, adam_base(config), scaling))
    return optimizer_from_config(config, rate, mu_dtype=config.mu_dtype, nu_dtype=config.nu_dtype, adam=adam)


def phase_hyperparameters(config: Config, plan: RampPlan) -> list[dict[str, float]]:
    """Return the hyperparameters of every phase by key, as `rampup plan --hyperparameters --json` prints them.

    All are of the first step of the phase. `peak_learning_rate` leaves warm-up and decay out, but not Seesaw's cuts.
    `adam_b2_half_life_tokens` are the tokens after which a gradient has half of its weight in AdamW's second moment.
    """
    rate, constants = learning_rate(config, plan), hyperparameters(config, plan)
    rows = []
    for phase in plan.ramp.phases:
        segment, adam = plan.segment_at(phase.start_step), constants[plan.segment_index(phase.start_step)]
        level = 1.0 if segment.level is None else segment.level
        row = {
            "learning_rate_scale": segment.scale,
            "learning_rate": rate.at(phase.start_step),
            "peak_learning_rate": config.learning_rate * segment.scale * level,
        }
        if config.opt_type == "adamw":
            steps = math.log(0.5) / math.log(adam.b2) if adam.b2 else 0.0
            row |= {"adam_b1": adam.b1, "adam_b2": adam.b2, "adam_eps": adam.eps, "adam_weight_decay": adam.weight_decay}
            row["adam_b2_half_life_tokens"] = steps * phase.global_batch_size * config.max_target_length
        rows.append(row)
    return rows


def metric_writers(config: Config) -> Callable[[Path, int], list[MetricWriter]]:
    """Return a function from a run's folder and first step to the configured writers.

    Raises:
        MissingDependencyError: a package that they need is not installed.
    """
    makers: list[Callable[[Path, int], MetricWriter]] = []
    if config.enable_tensorboard:
        required("tensorboardX")
        makers.append(lambda folder, start: TensorBoardWriter(folder / TENSORBOARD_FOLDER, start=start))
    if config.wandb_project is not None:
        required("wandb")
        project, values = config.wandb_project, config.to_dict()
        makers.append(lambda folder, start: WandbWriter(folder, project=project, config=values))
    return lambda folder, start: [make(folder, start) for make in makers]


def model_loss(config: Config, model: LanguageModel, plan: RampPlan, mesh: Mesh) -> Any:
    """Return the loss: a `PipelinedLoss` if there are stages, else one that sums over the microbatches on every replica."""
    types = {"reduction_dtype": jnp.dtype(config.gradient_reduction_dtype)}
    if config.gradient_accumulator_dtype != "float32":
        # float32 is the default, and the only type that the engine `multi_steps` takes.
        types["accumulator_dtype"] = jnp.dtype(config.gradient_accumulator_dtype)
    if plan.splitter.num_stages > 1:
        loss: Any = model.pipelined(plan.splitter.num_repeats, keep=config.pipeline_keep)
    elif config.measure_gradient_noise or (config.shard_optimizer_over_data and mesh.shape[DATA] > 1):
        # The loss must leave whole gradients on each replica. The noise is measured on those of a microbatch, and parts of them
        # over the replicas may cut the dimension that fsdp shards. So the compiler gathers the parameters, not the loss.
        loss = AccumulatedLoss(model.loss)
    else:
        loss = model.sharded_loss(mesh)
    return replace(loss, **types)


def _num_eval_batches(config: Config, num_rows: int, batch_size: int) -> int:
    """Return the batches of an evaluation on held-out rows."""
    available = num_rows // batch_size
    wanted = available if config.eval_steps == -1 else config.eval_steps
    if wanted == DEFAULTS["eval_steps"]:
        # The default suits small files too, also if it is written in a file. Any other number is an error if there are fewer.
        wanted = min(wanted, max(available, 1))
    if 1 <= wanted <= available:
        return wanted
    needs = f"eval_steps={wanted} batches" if wanted > 1 else "a batch"
    fix = f"eval_steps={available}, " if available else ""
    raise DataError(
        f"evaluation needs {needs} of {batch_size} rows, but {num_rows:,} rows are held out, {available} batches; set {fix}a "
        "smaller eval_per_device_batch_size, a larger eval_holdout_fraction, or eval_interval=-1",
        key="eval_steps" if available else "eval_per_device_batch_size",
        nearest=(available,) if available else (),
    )


def _evaluation(config: Config, setup: TrainSetup, rows: RowSource, loading: Loading) -> EvalOptions:
    """Return the evaluation: the weighted mean loss over the same held-out rows every time."""
    size = setup.plan.eval_global_batch_size
    assert size is not None  # None only with eval_interval=-1
    step, plan = setup.evaluation(size, _num_eval_batches(config, len(rows), size))
    order = SampleOrder(len(rows), seed=None)
    loader = BatchLoader(source=rows, plan=plan, mesh=setup.mesh, order=order, loading=loading)

    def evaluate(state: Any) -> dict[str, float]:
        sums = [step(state, batch) for batch in loader.batches()]
        # float64: the weights of many batches add up to more than float32 counts exactly.
        loss, weight = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        return {"eval_loss": float(loss / weight), "eval_tokens": int(weight)}

    return EvalOptions(evaluate=evaluate, eval_interval=config.eval_interval)


def _check_data(rows: RowSource, loading: Loading) -> dict[str, str]:
    """Check that all processes have the same training data, and return the fingerprints of its files."""
    # A process that does not read knows no fingerprints. Process 0 reads.
    facts = {"num_rows": len(rows)} | ({"data": fingerprints(files_of(rows))} if loading.reads else {})
    check_consistent(facts)
    found: dict[str, str] = json.loads(broadcast_from_process0("data", json.dumps(facts.get("data"))))
    return found


def _check_host_memory(config: Config, mesh: Mesh) -> None:
    """Refuse to keep a part of the state in host memory where the devices cannot use it."""
    offload = ("parameter_memory_host_offload", "optimizer_memory_host_offload")
    enabled = [name for name in offload if getattr(config, name)]
    problem = host_memory_problem(mesh) if enabled else None
    if problem:
        raise ConfigError(
            f"{enabled[0]}=true keeps a part of the state in host memory, but {problem}", key=enabled[0], nearest=(False,)
        )


def _check_expansion_factor(config: Config) -> None:
    """Refuse values of `expansion_factor_real_data` with which a run can be planned but not trained."""
    factor = config.expansion_factor_real_data
    if factor > 1 and factor.denominator != 1:
        raise ConfigError(
            f"expansion_factor_real_data={float(factor)} must be a whole number of processes, or -1",
            key="expansion_factor_real_data",
            nearest=(-1, int(factor), int(factor) + 1),
        )
    if 0 < factor < 1:
        raise ConfigError(
            f"expansion_factor_real_data={float(factor)} below 1 is MaxText's way to resume on fewer hosts; here a position "
            "does not depend on hosts: set it to -1",
            key="expansion_factor_real_data",
            nearest=(-1,),
        )
