"""The byte-level language model that `rampup train` trains.

Data flow: `load_config` -> `build_plan` -> `Run.from_config(config, plan)` ->
`run.train()`. The function `train` does it all.
"""

from __future__ import annotations

import functools
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

from rampup.config.build import build_plan
from rampup.config.draft import adam_base, adam_scaling, hyperparameters
from rampup.config.notes import plan_notes
from rampup.config.resume import plan_to_resume, ramp_record
from rampup.config.schema import (
    PER_PROCESS_KEYS,
    Config,
    DataKeys,
    OptimizerKeys,
    RunKeys,
)
from rampup.data.batches import BatchLoader, BatchOptions, Loading, SampleOrder
from rampup.data.files import fingerprints, open_sources, shared_sources
from rampup.data.sources import files_of
from rampup.engine.accumulate import AccumulatedLoss
from rampup.engine.evaluation import EvalStep
from rampup.engine.keys import random_key
from rampup.engine.mesh import DATA, BatchAxes, make_mesh, replicated
from rampup.engine.multi_steps import multi_steps
from rampup.engine.optimizer import AdamSchedule, LearningRate, optimizer_from_config
from rampup.engine.pipeline import permute_layers
from rampup.engine.processes import is_primary, wait_for_all
from rampup.engine.state import TrainState, create_state
from rampup.engine.step import TrainStep, train_step
from rampup.engine.zero import scattered_shardings
from rampup.errors import ConfigError, DataError, a_type
from rampup.lm.auto_batch import AutoBatch
from rampup.lm.start import keep_config, run_in_folder
from rampup.lm.transformer import LanguageModel, matrices
from rampup.loop.checkpoint import CheckpointOptions, SavedCheckpoint
from rampup.loop.components import Component, NoiseAverages
from rampup.loop.distributed import check_consistent, join
from rampup.loop.events import OnEvent, RunPlanned, ignore_event
from rampup.loop.loop import EvalOptions, Loop, Summary
from rampup.loop.metrics import (
    TENSORBOARD_FOLDER,
    MetricOptions,
    MetricWriter,
    TensorBoardWriter,
    WandbWriter,
    required,
)
from rampup.loop.run_folder import as_path
from rampup.loop.same_run import RAMP_ROWS, SameRun
from rampup.plan.auto import AutoSchedule
from rampup.plan.noise_scale import default_half_life
from rampup.plan.numbers import AUTO
from rampup.plan.pipeline import stage_layer_order
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.plan.split import BatchSplitter

# The key of a checkpoint's record for what its ramp is built from; that of an `auto`
# ramp as it has grown is RAMP_ROWS.
RAMP_RECORD = "ramp_record"


def train(
    config: Config,
    on_event: OnEvent = ignore_event,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Train the language model as configured, in the run's folder, from its newest
    checkpoint if there is one.

    Several processes that are started alike train one model together; see
    `rampup.loop.distributed.join`.

    Args:
        config: the configuration.
        on_event: called with every event of the run; see `rampup.loop.events`.
        should_stop: called once before every step, in every process; True in one of
            them stops the run as SIGTERM does.

    Returns:
        The summary of the run, in the names of `rampup train --json`.

    Raises:
        RampupError: before any work, if the configuration cannot be run here.

    >>> import rampup, tempfile
    >>> tiny = "base_emb_dim=16 base_num_decoder_layers=1 base_mlp_dim=32 steps=3"
    >>> tiny += " max_target_length=16 eval_interval=-1 per_device_batch_size=4"
    >>> folder = tempfile.mkdtemp()
    >>> config = rampup.load_config(
    ...     "base",
    ...     [*tiny.split(), f"base_output_directory={folder}", "run_name=tiny"],
    ... )
    >>> summary = rampup.train(config)
    >>> summary.steps, summary.num_compilations
    (3, 1)
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"train takes a Config, not {a_type(config)}; read a file with"
            " rampup.load_config(PATH)"
        )
    join(
        coordinator_address=config.coordinator_address,
        num_processes=None if config.num_processes == -1 else config.num_processes,
        process_id=None if config.process_id == -1 else config.process_id,
        distributed=config.distributed,
        heartbeat_timeout=config.jax_distributed_heartbeat_timeout_seconds,
    )

    def make(saved: SavedCheckpoint | None) -> Run:
        plan = plan_of_run(config, jax.device_count(), saved)
        return Run.from_config(config, plan, saved)

    return run_in_folder(
        config,
        make,
        lambda run, folder: run.train_in(folder, on_event, should_stop),
    )


def plan_of_run(
    config: Config, num_devices: int, saved: SavedCheckpoint | None
) -> RampPlan:
    """Return the plan of a new run, or of one that goes on from a checkpoint: its
    batches are those that it had, also on other devices.
    """
    ramp = None if saved is None else ramp_before(saved.record)
    if ramp is None:
        return build_plan(config, num_devices)
    return plan_to_resume(config, num_devices, ramp)


def ramp_before(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ramp in a checkpoint's record, as it had grown until then, with `step`
    and the keys that built it, or None.
    """
    if RAMP_RECORD not in record:
        return None
    return {
        **record[RAMP_RECORD],
        "ramp": record[RAMP_ROWS],
        "step": record["step"],
    }


@dataclass(frozen=True, kw_only=True)
class TrainSetup:
    """The model, its optimizer and its training step on a mesh: a run without its data
    and its folder.
    """

    config: Config
    plan: RampPlan  # another one of as many stages and repeats can take its place
    mesh: Mesh
    model: LanguageModel
    param_shardings: Any
    layer_order: np.ndarray  # in which pipeline stages store the layers
    tx: optax.GradientTransformation  # which `step.tx` may wrap

    @classmethod
    def from_config(cls, config: Config, plan: RampPlan, mesh: Mesh) -> Self:
        """Build model, optimizer and training step, or refuse a mesh that the
        configuration cannot use.
        """
        model = LanguageModel.from_config(config).on(mesh)
        splitter = plan.splitter
        return cls(
            config=config,
            plan=plan,
            mesh=mesh,
            model=model,
            param_shardings=model.shardings(mesh),
            layer_order=np.array(
                stage_layer_order(
                    config.base_num_decoder_layers,
                    splitter.num_stages,
                    splitter.num_repeats,
                )
            ),
            tx=optimizer(config, learning_rate(config, plan)),
        )

    @functools.cached_property
    def loss(self) -> Any:
        """The loss: a `PipelinedLoss` if there are stages, else one that sums over the
        microbatches on every replica.
        """
        config = self.config
        model = self.model
        splitter = self.plan.splitter
        types = {"reduction_dtype": jnp.dtype(config.gradient_reduction_dtype)}
        if config.gradient_accumulator_dtype != "float32":
            # float32 is the default, and the only type that the engine `multi_steps`
            # takes.
            types["accumulator_dtype"] = jnp.dtype(config.gradient_accumulator_dtype)
        if splitter.num_stages > 1:
            loss = model.pipelined(splitter.num_repeats)
        elif (
            splitter.whole_batch
            or config.measure_gradient_noise
            or (config.shard_optimizer_over_data and self.mesh.shape[DATA] > 1)
        ):
            # The noise is measured on the whole gradients of a microbatch, and parts of
            # them over the replicas may cut the dimension that fsdp shards. So the
            # compiler gathers the parameters, as it does for whole batches.
            loss = AccumulatedLoss(model.loss, whole_batch=splitter.whole_batch)
        else:
            loss = model.sharded_loss(self.mesh)
        return replace(loss, **types)

    @functools.cached_property
    def step(self) -> TrainStep:
        """The training step, or an error if the plan, the mesh or the optimizer do not
        allow it.
        """
        config = self.config
        tx = self.tx
        if config.gradient_accumulation == "multi_steps":
            if config.shard_optimizer_over_data:
                raise ConfigError(
                    "shard_optimizer_over_data=true needs gradient_accumulation=fused",
                    fix="multi_steps runs the optimizer at every microbatch",
                    key="shard_optimizer_over_data",
                    nearest=(False,),
                )
            tx = multi_steps(tx, self.plan)
        return train_step(
            self.loss,
            tx,
            self.plan,
            self.mesh,
            seed=config.init_weights_seed,
            skip_nonfinite=config.skip_nonfinite > 0,
            measure_gradient_noise=config.measure_gradient_noise,
            check_loss=False,  # a sum over rows: tested
        )

    def evaluation(self, size: int, num_batches: int) -> tuple[EvalStep, RampPlan]:
        """Return the evaluation step, which is without dropout, and the plan of its
        batches of `size` rows.
        """
        plan = self.plan
        loss = replace(self, model=replace(self.model, dropout_rate=0.0)).loss
        eval_plan = RampPlan(
            ramp=BatchRamp.constant(size),
            splitter=plan.splitter.for_eval(),
            num_devices=plan.num_devices,
            axes=plan.axes,
            total_steps=num_batches,
        )
        return EvalStep(loss, self.mesh, check_loss=False), eval_plan

    def initial_state(self) -> TrainState:
        """Return the state of step 0."""
        # It runs once. On CPUs, XLA takes four times as long to optimize its random
        # numbers.
        options = (
            {"xla_backend_optimization_level": 0}
            if jax.default_backend() == "cpu"
            else None
        )
        init = jax.jit(
            lambda key: permute_layers(self.model.init(key), self.layer_order),
            out_shardings=self.param_shardings,
            compiler_options=options,
        )
        wait_for_all(self.mesh)
        params = init(random_key(self.config.init_weights_seed))
        return create_state(
            params,
            self.step.tx,
            self.mesh,
            shard_optimizer_over_data=self.config.shard_optimizer_over_data,
        )

    def state_shapes(self) -> TrainState:
        """Return the shapes, types and shardings of `initial_state`, without allocating
        it.
        """
        whole = replicated(self.mesh)

        def shape_of(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        params = jax.tree.map(
            shape_of,
            jax.eval_shape(self.model.init, jax.random.key(0)),
            self.param_shardings,
        )
        # Leaves that mirror a parameter, such as Adam's moments, have its sharding. The
        # others are replicated.
        opt_state = optax.tree.map_params(
            self.step.tx,
            lambda leaf, param: shape_of(leaf, param.sharding),
            jax.eval_shape(self.step.tx.init, params),
            params,
            transform_non_params=lambda leaf: shape_of(leaf, whole),
        )
        if self.config.shard_optimizer_over_data:
            scattered = scattered_shardings(
                opt_state, self.mesh, BatchAxes.of(self.mesh)
            )
            opt_state = jax.tree.map(shape_of, opt_state, scattered)
        step = shape_of(np.int32(0), whole)
        return TrainState(step=step, params=params, opt_state=opt_state)

    def reorder_layers(
        self, state: TrainState
    ) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return functions that put the layers of a state into their natural order,
        that of checkpoints, and back.
        """
        if (self.layer_order == np.arange(len(self.layer_order))).all():
            return lambda state: state, lambda state: state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

        def permutation(order: np.ndarray) -> Callable[[Any], Any]:
            return jax.jit(
                lambda state: permute_layers(state, order),
                out_shardings=shardings,
            )

        return permutation(np.argsort(self.layer_order)), permutation(self.layer_order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of the language model: everything from the mesh to the data, ready to
    train. `rampup.train` makes one and trains it.

    >>> import jax, rampup
    >>> tiny = "base_emb_dim=16 base_num_decoder_layers=1 base_mlp_dim=32".split()
    >>> config = rampup.load_config("base", [*tiny, "max_target_length=16"])
    >>> plan = rampup.build_plan(config, jax.device_count())
    >>> run = rampup.lm.Run.from_config(config, plan)
    >>> run.setup.model.num_parameters
    10800
    """

    setup: TrainSetup  #: the model, its optimizer and its training step on a mesh
    saved: SavedCheckpoint | None  #: the checkpoint from which it resumes, or None
    loader: BatchLoader  #: reads the batch of every step
    data: Mapping[str, str]  #: fingerprints of the files with training data
    evaluation: EvalOptions | None  #: when to evaluate, and how; None = never

    @classmethod
    def from_config(
        cls, config: Config, plan: RampPlan, saved: SavedCheckpoint | None = None
    ) -> Self:
        """Build a run on all devices, and check everything that can be checked. Nothing
        is written.

        Args:
            config: the configuration.
            plan: that of `build_plan` or, with a checkpoint from which to resume, of
                `rampup.config.resume.plan_to_resume`.
            saved: the checkpoint from which to resume; None = none.

        Returns:
            The run, ready to train.

        Raises:
            RampupError: the configuration cannot be run here, or the processes have
                different configurations or data.
        """
        # Before a process opens data for others, which wait for it.
        check_consistent(
            {
                name: value
                for name, value in config.to_dict().items()
                if name not in PER_PROCESS_KEYS
            }
        )
        metric_writers(config)  # whose packages must be installed
        loading = loading_of(config)
        setup = TrainSetup.from_config(config, plan, make_mesh(plan.axes))
        chunk_size = (
            setup.step.chunk_size
        )  # also checks the step before data are opened
        train_rows, eval_rows = shared_sources(loading, config)
        data = fingerprints(files_of(train_rows))
        # A process that does not read knows no files.
        check_consistent(
            {"num_rows": len(train_rows)} | ({"data": data} if loading.reads else {})
        )
        # The most samples that the run can take.
        num_samples = (
            plan.consumed_samples if plan.auto is None else plan.auto["max_samples"]
        )
        loader = BatchLoader(
            source=train_rows,
            plan=plan,
            mesh=setup.mesh,
            order=sample_order(config, len(train_rows), num_samples),
            options=BatchOptions(chunk_size=chunk_size),
            loading=loading,
        )
        return cls(
            setup=setup,
            saved=saved,
            loader=loader,
            data=data,
            evaluation=evaluation_of(setup, eval_rows, loading),
        )

    def train(
        self,
        on_event: OnEvent = ignore_event,
        *,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Summary:
        """Train in the run's folder, to the plan's end or to SIGTERM.

        Args:
            on_event: called with every event of the run, in process 0.
            should_stop: called once before every step, see `rampup.train`.

        Returns:
            The summary of the run.

        Raises:
            ConfigError: the folder has a checkpoint, and the run was made without it.
        """
        config = self.setup.config

        def make(found: SavedCheckpoint | None) -> Run:
            if self.saved is None and found is not None:
                folder = as_path(config.base_output_directory) / config.run_name
                raise ConfigError(
                    f"{folder} already has a checkpoint: start `rampup train` again, or"
                    " give it to Run.from_config, to resume",
                    key="run_name",
                )
            return self

        return run_in_folder(
            config,
            make,
            lambda run, folder: run.train_in(folder, on_event, should_stop),
        )

    def train_in(
        self, folder: Path, on_event: OnEvent, should_stop: Callable[[], bool]
    ) -> Summary:
        """Train in a folder that this process owns, see `run_in_folder`.

        Args:
            folder: the folder of the run.
            on_event: called with every event of the run, in process 0.
            should_stop: called once before every step, see `rampup.train`.

        Returns:
            The summary of the run.
        """
        setup = self.setup
        config = setup.config
        plan = setup.plan
        on_event = on_event if is_primary() else ignore_event
        on_event(
            RunPlanned(
                plan=plan,
                folder=folder,
                devices=jax.devices(),
                num_parameters=setup.model.num_parameters,
                notes=plan_notes(config, plan),
            )
        )
        state = setup.initial_state()
        to_saved, from_saved = setup.reorder_layers(state)
        # None: the keys of the identity and the fingerprints of the data say what the
        # run computes, so its jaxpr need not be compared.
        components: list[Component] = [SameRun(None)]
        auto = None
        if config.measure_gradient_noise:
            half_life = config.gradient_noise_half_life_samples
            noise = NoiseAverages(
                default_half_life(plan) if half_life == -1 else half_life
            )
            components.append(noise)
            if plan.follows:
                auto = AutoSchedule(
                    sizes=plan.reserved_sizes,
                    half_life_samples=noise.half_life_samples,
                    rows=plan.ramp.to_rows(),
                    max_waste=config.auto_max_waste,
                )
                components.append(AutoBatch(auto, noise, on_event))
        rate = learning_rate(config, plan)

        def rate_now() -> LearningRate:
            # A ramp that follows the run grows while it runs.
            nonlocal rate
            if auto is not None and len(auto.rows) > len(rate.plan.ramp.phases):
                rate = learning_rate(config, plan.grown(auto.ramp))
            return rate

        run = Loop(
            plan=plan,
            step=setup.step,
            batches=lambda start, plan=plan: replace(self.loader, plan=plan).batches(
                start
            ),
            folder=folder,
            metrics=MetricOptions(
                learning_rate=lambda step: rate_now().at(step),
                tokens_per_sample=config.max_target_length,
                flops_per_sample=setup.model.flops_per_sample(config.max_target_length),
                on_event=on_event,
            ),
            components=tuple(components),
            checkpoints=CheckpointOptions(
                identity={
                    "num_rows": len(self.loader.source),
                    "data": self.data,
                    **config.identity(),
                    # As runs of before `data_shuffle_seed: null` say it.
                    "enable_data_shuffling": config.data_shuffle_seed is not None,
                },
                extra_metadata={RAMP_RECORD: ramp_record(config, plan)},
                to_saved=to_saved,
                from_saved=from_saved,
            ),
            evaluation=self.evaluation,
        )
        loop = loop_of(config, run)
        state, start = loop.restore(state, self.saved)
        if start < plan.total_steps:
            keep_config(config, folder, start, on_event)
        _, summary = loop.train(state, start, should_stop=should_stop)
        return (
            summary
            if auto is None
            else replace(summary, batch_size_schedule=auto.schedule)
        )


def loading_of(config: Config) -> Loading:
    """Return which processes load rows, by `expansion_factor_real_data`, or refuse a
    factor with which rampup does not train.
    """
    key = "expansion_factor_real_data"
    factor = config.expansion_factor_real_data
    if factor > 1 and factor.denominator != 1:
        raise ConfigError(
            f"{key}={float(factor)} must be a whole number of processes, or -1",
            key=key,
            nearest=(-1, int(factor), int(factor) + 1),
        )
    if 0 < factor < 1:
        raise ConfigError(
            f"{key}={float(factor)} below 1 is MaxText's way to resume on fewer hosts",
            fix="here a position does not depend on hosts: set it to -1",
            key=key,
            nearest=(-1,),
        )
    return Loading(factor=max(int(factor), 1) if jax.process_count() > 1 else 1)


def evaluation_of(
    setup: TrainSetup, eval_rows: Any, loading: Loading
) -> EvalOptions | None:
    """Return when a run evaluates, and how; None = never."""
    config = setup.config
    if config.eval_interval == -1:
        return None
    # The weighted mean loss over the same held-out rows every time.
    size = setup.plan.eval_global_batch_size
    assert size is not None  # None only with eval_interval=-1
    available = len(eval_rows) // size
    if available == 0:
        raise DataError(
            f"evaluation needs a batch of {size} rows; held out: {len(eval_rows):,}",
            fix="set a smaller eval_per_device_batch_size, more"
            " grain_eval_files, or eval_interval=-1",
            key="eval_per_device_batch_size",
        )
    num_batches = (
        available if config.eval_steps == -1 else min(config.eval_steps, available)
    )
    step, eval_plan = setup.evaluation(size, num_batches)
    eval_loader = BatchLoader(
        source=eval_rows,
        plan=eval_plan,
        mesh=setup.mesh,
        order=SampleOrder(len(eval_rows), seed=None),
        loading=loading,
    )

    def evaluate(state: Any) -> dict[str, float]:
        sums = [step(state, batch) for batch in eval_loader.batches()]
        # float64: the weights of many batches add up to more than float32
        # counts exactly.
        loss, weight = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        return {"eval_loss": float(loss / weight), "eval_tokens": int(weight)}

    return EvalOptions(evaluate=evaluate, eval_interval=config.eval_interval)


def unconstrained(splitter: BatchSplitter) -> BatchSplitter:
    """Return the rule that splits a run's batches without the configuration's own
    microbatch and accumulation.
    """
    return replace(
        splitter,
        microbatch_size=AUTO,
        gradient_accumulation_steps=1,
        rampup_microbatch="fixed",
        tick_overhead=None,
    )


def learning_rate(config: OptimizerKeys, plan: RampPlan) -> LearningRate:
    """Return the learning-rate schedule that the configuration describes."""
    return LearningRate.from_config(config, plan)


def optimizer(
    config: Config, rate: LearningRate, run_plan: RampPlan | None = None
) -> optax.GradientTransformation:
    """Return the optimizer, whose constants follow the batches of the rate's plan and
    the length of `run_plan`.
    """
    scaling = adam_scaling(config, run_plan or rate.plan)
    adam = (
        AdamSchedule.from_scaling(rate.plan, adam_base(config), scaling)
        if scaling.is_active
        else None
    )
    return optimizer_from_config(
        config,
        rate,
        mu_dtype=config.mu_dtype,
        adam=adam,
        matrices=matrices,
    )


def phase_hyperparameters(config: Config, plan: RampPlan) -> list[dict[str, float]]:
    """Return the hyperparameters at the first step of every phase, as `rampup plan
    --hyperparameters --json` prints them.
    """
    rate = learning_rate(config, plan)
    constants = hyperparameters(config, plan)
    rows = []
    for phase in plan.ramp.phases:
        segment = plan.segment_at(phase.start_step)
        adam = constants[plan.segment_index(phase.start_step)]
        level = 1.0 if segment.level is None else segment.level
        row = {
            "learning_rate_scale": segment.scale,
            "learning_rate": rate.at(phase.start_step),
            # without warm-up and decay
            "peak_learning_rate": config.learning_rate * segment.scale * level,
        }
        if config.opt_type == "adamw":
            steps = math.log(0.5) / math.log(adam.b2) if adam.b2 else 0.0
            row |= {
                "adam_b1": adam.b1,
                "adam_b2": adam.b2,
                "adam_eps": adam.eps,
                "adam_weight_decay": adam.weight_decay,
                "adam_b2_half_life_tokens": (
                    steps * phase.global_batch_size * config.max_target_length
                ),
            }
        rows.append(row)
    return rows


def loop_of(config: RunKeys, run: Loop) -> Loop:
    """Return a run with what its configuration's keys say about any run: its metric
    writers, skipped steps and checkpoints.

    Args:
        config: the configuration of a model or of a rollout.
        run: the loop, with what is not a key.
    """
    return replace(
        run,
        metrics=replace(
            run.metrics,
            writers=functools.partial(metric_writers(config), run.folder),
            skip_nonfinite=config.skip_nonfinite,
        ),
        checkpoints=replace(
            run.checkpoints,
            checkpoint_period=(
                config.checkpoint_period if config.enable_checkpointing else None
            ),
            max_to_keep=config.max_num_checkpoints_to_keep,
            async_checkpointing=config.async_checkpointing,
        ),
    )


def metric_writers(config: RunKeys) -> Callable[[Path, int], list[MetricWriter]]:
    """Return a function from a run's folder and first step to the configured writers,
    whose packages must be installed.
    """
    makers: list[Callable[[Path, int], MetricWriter]] = []
    if config.enable_tensorboard:
        required("tensorboardX")
        makers.append(
            lambda folder, start: TensorBoardWriter(
                folder / TENSORBOARD_FOLDER, start=start
            )
        )
    if config.wandb_project is not None:
        required("wandb")
        project, values = config.wandb_project, config.to_dict()
        makers.append(
            lambda folder, start: WandbWriter(folder, project=project, config=values)
        )
    return lambda folder, start: [make(folder, start) for make in makers]


def sample_order(config: DataKeys, num_rows: int, consumed_samples: int) -> SampleOrder:
    """Return the order of the training rows, or refuse more samples than `num_epoch`
    passes contain.
    """
    seed = config.data_shuffle_seed
    order = SampleOrder(
        num_rows,
        seed=seed,
        num_epochs=None if config.num_epoch == -1 else config.num_epoch,
    )
    order.check(consumed_samples)
    return order


def rows_of_step(config: Config, plan: RampPlan, step: int) -> list[dict[str, Any]]:
    """Return the samples that a step reads: number of the sample, row, and where the
    row comes from.
    """
    if not 0 <= step < plan.total_steps:
        last = plan.total_steps - 1
        raise ConfigError(
            f"step={step} must be from 0 to {last}", key="step", nearest=(0, last)
        )
    rows, _ = open_sources(config)
    order = sample_order(config, len(rows), plan.ramp.samples_before(step + 1))
    samples = zip(plan.rows(step), order.rows(plan.rows(step)).tolist(), strict=True)
    return [
        {"sample": sample, "row": row, "source": rows.describe(row)}
        for sample, row in samples
    ]
