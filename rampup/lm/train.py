"""The byte-level language model that `rampup train` trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from rampup.config.build import build_plan, mesh_axes
from rampup.config.files import run_yaml
from rampup.config.resume import plan_to_resume, ramp_record
from rampup.config.schema import IDENTITY_KEYS, KEYS, PER_PROCESS_KEYS, Config
from rampup.errors import ConfigError, DataError
from rampup.lm.data import data_options, described_rows, sources
from rampup.lm.transformer import LanguageModel
from rampup.plan.pipeline import stage_layer_order
from rampup.plan.plan import RampPlan
from rampup.plan.ramp import BatchRamp
from rampup.run.checkpoint import newest_record
from rampup.run.compile import enable_compilation_cache
from rampup.run.data.batches import Batch, SampleOrder, step_batches
from rampup.run.data.fingerprint import fingerprints
from rampup.run.data.loading import Loading, shared_sources
from rampup.run.data.sources import RowSource, files_of
from rampup.run.distributed import check_same, from_first, is_first, join, watchdog
from rampup.run.loop import CHECKPOINT_FOLDER, Loop, Progress, Summary
from rampup.run.mesh import make_mesh, replicated
from rampup.run.offload import fetch_offloaded, host_memory_problem, host_shardings
from rampup.run.optimizer import LearningRate, make_optimizer
from rampup.run.pipeline import permute_layers
from rampup.run.run_folder import run_folder
from rampup.run.step import EvalStep, TrainState, TrainStep, create_state, train_step
from rampup.run.writers import TENSORBOARD_FOLDER, MetricWriter, TensorBoardWriter, WandbWriter, required

# What the run was last started with; written when the run's checkpoint, if there is one, has been accepted.
CONFIG_FILE = "config.yml"
RAMP_RECORD = "ramp_record"
_OFFLOAD = ("parameter_memory_host_offload", "optimizer_memory_host_offload")


def train(config: Config, progress: Progress = lambda event, values: None) -> Summary:
    """Train the language model as configured, in the run's folder.

    Args:
        config: the configuration.
        progress: called with an event's name and its values; see `Loop`. The first event is `plan`.

    Several processes that are started alike train one model together: see `rampup.run.distributed.join`.

    Returns:
        What the run did.

    Raises:
        RampupError: before any work, if the configuration cannot be run here.
    """
    join(
        coordinator_address=config.coordinator_address,
        num_processes=None if config.num_processes == -1 else config.num_processes,
        process_id=None if config.process_id == -1 else config.process_id,
        initialization_timeout=config.jax_distributed_initialization_timeout,
        heartbeat_timeout=2 * config.jax_distributed_heartbeat_timeout_seconds,
    )
    enable_compilation_cache(config.jax_cache_dir)
    with watchdog(config.jax_distributed_heartbeat_timeout_seconds):
        return _train(config, progress if is_first() else lambda event, values: None)


def _train(config: Config, progress: Progress) -> Summary:
    written = _written_ramp(config)
    plan = build_plan(config, jax.device_count()) if written is None else plan_to_resume(config, jax.device_count(), written)
    _refuse_what_is_only_planned(config)
    mesh = make_mesh(mesh_axes(config, plan.num_devices))
    model = language_model(config).on(mesh)
    _check_devices(config, mesh)
    loading = Loading(factor=max(int(config.expansion_factor_real_data), 1) if jax.process_count() > 1 else 1)
    train_rows, eval_rows = shared_sources(loading, lambda: sources(config))
    data = data_options(config)
    samples = SampleOrder(len(train_rows), seed=data["seed"], num_epochs=data["num_epochs"])
    samples.check(plan.consumed_samples)
    rate, order = learning_rate(config, plan), _layer_order(config, plan)
    step, writers = training_step(config, plan, mesh), metric_writers(config)
    evaluate = None if config.eval_interval == -1 else _evaluation(config, plan, mesh, model, eval_rows, loading)
    content = _agreed_content(config, train_rows, loading)
    folder = Path(from_first("folder", str(run_folder(config.base_output_directory, config.run_name)) if is_first() else ""))
    facts = {"folder": str(folder), "devices": jax.devices(), "num_parameters": model.num_parameters}
    progress("plan", {"plan": plan, **facts})
    state = initial_state(config, plan, mesh, step.tx)

    def batches(start: int) -> Iterator[Batch]:
        chunk_size = 1 if config.gradient_accumulation == "multi_steps" else None
        options = data | {"chunk_size": chunk_size, "split_for": step.split_for, "loading": loading}
        return step_batches(train_rows, plan, mesh, start=start, **options)

    return Loop(
        plan=plan,
        step=step,
        batches=batches,
        learning_rate=rate.at,
        folder=folder,
        tokens_per_sample=config.max_target_length,
        flops_per_sample=model.flops_per_sample(config.max_target_length),
        writers=functools.partial(writers, folder),
        record={"num_rows": len(train_rows), "data": content, **{name: getattr(config, name) for name in IDENTITY_KEYS}},
        remarks={RAMP_RECORD: ramp_record(config, plan)},
        ramp_before=None if written is None else BatchRamp.from_rows(written["ramp"]),
        evaluate=evaluate,
        eval_interval=None if config.eval_interval == -1 else config.eval_interval,
        checkpoint_period=config.checkpoint_period if config.enable_checkpointing else None,
        keep_checkpoints=config.max_num_checkpoints_to_keep,
        async_checkpoints=config.async_checkpointing,
        on_checkpoint_error=config.on_checkpoint_error,
        skip_nonfinite=config.skip_nonfinite,
        rows_of=lambda step: described_rows(train_rows, samples, plan, step),
        to_checkpoint=_reordering(state, np.argsort(order)),
        from_checkpoint=_reordering(state, order),
        progress=_keeping(replace(config, num_devices=plan.num_devices), folder, progress),
    ).run(state)


def _agreed_content(config: Config, rows: RowSource, loading: Loading) -> dict[str, str]:
    """Return what the files of the data hold, which every process has found to be the same, as it has the configuration."""
    facts = {name: getattr(config, name) for name in KEYS if name not in PER_PROCESS_KEYS} | {"num_rows": len(rows)}
    content = fingerprints(files_of(rows)) if loading.reads else {}
    check_same(facts | ({"data": content} if loading.reads else {}))
    return dict(json.loads(from_first("data", json.dumps(content))))


def metric_writers(config: Config) -> Callable[[Path, int], list[MetricWriter]]:
    """Return what makes the writers that the configuration asks for, from a run's folder and first step.

    Raises:
        MissingDependencyError: a package that they need is not installed.
    """
    makers: list[Callable[[Path, int], MetricWriter]] = []
    if config.enable_tensorboard:
        required("tensorboardX")
        makers.append(lambda folder, start: TensorBoardWriter(folder / TENSORBOARD_FOLDER, start=start))
    if config.wandb_project is not None:
        required("wandb")
        project, keys = config.wandb_project, {name: getattr(config, name) for name in KEYS}
        values = json.loads(json.dumps(keys, default=float))
        makers.append(lambda folder, start: WandbWriter(folder, project=project, config=values))
    return lambda folder, start: [make(folder, start) for make in makers]


def training_step(config: Config, plan: RampPlan, mesh: Mesh) -> TrainStep:
    """Return the step that `train` runs."""
    return train_step(
        _loss(config, language_model(config).on(mesh), plan),
        optimizer(config, learning_rate(config, plan)),
        plan,
        mesh,
        engine=config.gradient_accumulation,
        seed=config.init_weights_seed,
        skip_nonfinite=config.skip_nonfinite > 0,
    )


def initial_state(config: Config, plan: RampPlan, mesh: Mesh, tx: Any) -> TrainState:
    """Return the state that `train` starts from."""
    model, order = language_model(config), _layer_order(config, plan)
    init = jax.jit(lambda key: permute_layers(model.init(key), order), out_shardings=model.shardings(mesh))
    state = create_state(init(jax.random.key(config.init_weights_seed)), tx, mesh)
    return jax.device_put(state, _placed(config, state))


def state_shapes(config: Config, mesh: Mesh, tx: Any) -> TrainState:
    """Return the shapes, types and shardings of `initial_state`, without any array."""
    model, whole = language_model(config), replicated(mesh)

    def of(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = jax.tree.map(of, jax.eval_shape(model.init, jax.random.key(0)), model.shardings(mesh))
    opt_state = optax.tree.map_params(
        tx,
        lambda leaf, param: of(leaf, param.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda leaf: of(leaf, whole),
    )
    state = TrainState(step=of(np.int32(0), whole), params=params, opt_state=opt_state)
    return jax.tree.map(of, state, _placed(config, state))


def _placed(config: Config, state: TrainState) -> TrainState:
    """Return the shardings of a state, with what the configuration keeps in host memory there."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    if config.parameter_memory_host_offload:
        shardings = shardings.replace(params=host_shardings(state.params))
    if config.optimizer_memory_host_offload:
        shardings = shardings.replace(opt_state=host_shardings(state.opt_state))
    return shardings


def _check_devices(config: Config, mesh: Mesh) -> None:
    """Refuse a model that the mesh's axes do not divide, and host memory where the devices cannot use it."""
    language_model(config).shardings(mesh)
    asked = [name for name in _OFFLOAD if getattr(config, name)]
    problem = host_memory_problem(mesh) if asked else None
    if problem:
        raise ConfigError(
            f"{asked[0]}=true keeps a part of the state in host memory, but {problem}", key=asked[0], nearest=(False,)
        )


def _keeping(config: Config, folder: Path, progress: Progress) -> Progress:
    """Return a progress callback that also leaves the configuration in the run's folder as soon as the run starts."""

    def keep_and_tell(event: str, values: Mapping[str, Any]) -> None:
        if event == "start" and is_first():
            (folder / CONFIG_FILE).write_text(run_yaml(config), encoding="utf-8")
        progress(event, values)

    return keep_and_tell


def _written_ramp(config: Config) -> dict[str, Any] | None:
    """Return what the newest checkpoint of the run says of its ramp, and its step; None if there is none."""
    folder = Path(config.base_output_directory) / config.run_name / CHECKPOINT_FOLDER
    record = newest_record(folder) if config.run_name else None
    return None if record is None or RAMP_RECORD not in record else {**record[RAMP_RECORD], "step": record["step"]}


def _loss(config: Config, model: LanguageModel, plan: RampPlan) -> Any:
    """Return the loss function, in parts if there are pipeline stages."""
    if plan.splitter.num_stages == 1:
        return model.loss
    return model.pipelined(plan.splitter.num_repeats, keep=config.pipeline_keep)


def _layer_order(config: Config, plan: RampPlan) -> np.ndarray:
    """Return the order in which the stages hold the layers; checkpoints hold them in their natural order."""
    splitter = plan.splitter
    return np.array(stage_layer_order(config.base_num_decoder_layers, splitter.num_stages, splitter.num_repeats))


def _reordering(state: Any, order: np.ndarray) -> Callable[[Any], Any]:
    """Return the function that puts a state's layers in an order, and leaves every array where it lies."""
    if (order == np.arange(len(order))).all():
        return lambda state: state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(lambda state: permute_layers(fetch_offloaded(state, shardings), order), out_shardings=shardings)


def _refuse_what_is_only_planned(config: Config) -> None:
    if config.expansion_factor_real_data > 1 and config.expansion_factor_real_data.denominator != 1:
        raise ConfigError(
            f"expansion_factor_real_data={float(config.expansion_factor_real_data)} must be a whole number of processes, or -1",
            key="expansion_factor_real_data",
            nearest=(-1, int(config.expansion_factor_real_data), int(config.expansion_factor_real_data) + 1),
        )
    if 0 < config.expansion_factor_real_data < 1:
        raise ConfigError(
            f"expansion_factor_real_data={float(config.expansion_factor_real_data)} below 1 is MaxText's way to resume on "
            "fewer hosts; here a position does not depend on hosts: set it to -1",
            key="expansion_factor_real_data",
            nearest=(-1,),
        )


def language_model(config: Config) -> LanguageModel:
    """Return the model that the configuration describes."""
    return LanguageModel(
        num_layers=config.base_num_decoder_layers,
        width=config.base_emb_dim,
        mlp_dim=config.base_mlp_dim,
        num_heads=config.base_num_query_heads,
        num_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size,
        tied=config.logits_via_embedding,
        dropout_rate=config.dropout_rate,
        dtype=config.dtype,
        remat_policy=config.remat_policy,
    )


def learning_rate(config: Config, plan: RampPlan) -> LearningRate:
    """Return the learning-rate schedule that the configuration describes."""
    return LearningRate(
        plan=plan,
        peak=config.learning_rate,
        kind=config.lr_schedule_type,  # type: ignore[arg-type]
        warmup_fraction=config.warmup_steps_fraction,
        final_fraction=config.learning_rate_final_fraction,
        decay_fraction=config.wsd_decay_steps_fraction,
        decay_style=config.wsd_decay_style,  # type: ignore[arg-type]
    )


def optimizer(config: Config, rate: Callable[[Any], Any]) -> Any:
    """Return the optimizer that the configuration describes."""
    return make_optimizer(
        rate,
        kind=config.opt_type,  # type: ignore[arg-type]
        b1=config.adam_b1,
        b2=config.adam_b2,
        eps=config.adam_eps,
        weight_decay=config.adam_weight_decay,
        clip_norm=config.gradient_clipping_threshold,
    )


def _evaluation(
    config: Config, plan: RampPlan, mesh: Mesh, model: LanguageModel, rows: RowSource, loading: Loading
) -> Callable[[Any], Mapping[str, float]]:
    """Return the evaluation: the weighted mean loss over the same held-out rows every time."""
    assert plan.eval_global_batch_size is not None
    available = len(rows) // plan.eval_global_batch_size
    num_batches = available if config.eval_steps == -1 else config.eval_steps
    if num_batches < 1 or num_batches > available:
        raise DataError(
            f"evaluation needs eval_steps={config.eval_steps} batches of {plan.eval_global_batch_size} rows, but {len(rows):,} "
            f"rows are held out, {available} batches; set eval_steps={available or 1}, a smaller eval_per_device_batch_size, "
            "or eval_interval=-1",
            key="eval_steps",
        )
    eval_plan = RampPlan(
        ramp=BatchRamp.constant(plan.eval_global_batch_size),
        splitter=plan.splitter.for_eval(),
        num_devices=plan.num_devices,
        total_steps=num_batches,
    )
    step = EvalStep(_loss(config, replace(model, dropout_rate=0.0), plan), mesh)

    def evaluate(state: Any) -> dict[str, float]:
        sums = [step(state, batch) for batch in step_batches(rows, eval_plan, mesh, loading=loading)]
        loss, weight = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
        return {"eval_loss": float(loss / weight), "eval_tokens": int(weight)}

    return evaluate
