"""MaxText's pre-training through a whole batch ramp in one executable: `python -m
rampup.contrib.maxtext base.yml ...`.

MaxText's own `main` runs, with MaxText's own keys. `install` replaces three of its
names: the manager of the ramp, the loader of batches, and the function that accumulates
gradients, for which there are two designs with one result. Every batch has the shape of
the final one; rows that it does not have are padding without targets. One executable
serves every batch size, as the number of microbatches is traced: up to the last one
that has a target.

Shape suffixes: K microbatches, R rows of one.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from rich.console import Console

from rampup.engine.accumulate import accumulate, take
from rampup.errors import (
    ConfigError,
    MissingDependencyError,
    RampupError,
    ResumeMismatchError,
    raise_together,
)
from rampup.plan.describe import MAX_PHASES, format_count
from rampup.plan.ramp import BatchRamp
from rampup.plan.ramp_keys import RampupBatchManager
from rampup.show.console import make_table

VERSION = "0.2.5"
TRAIN = "maxtext.trainers.pre_train.train"
UTILS = "maxtext.utils.train_utils"
GRADIENTS = "gradient_accumulation_loss_and_grad"
# What is replaced or used, with the arguments that it has in this version.
NAMES = {
    (TRAIN, "main"): "argv",
    (
        TRAIN,
        GRADIENTS,
    ): "_loss_fn config model params params_shardings data dropout_rng",
    (UTILS, "create_rampup_manager"): "config checkpoint_manager",
    (
        UTILS,
        "create_dataloader",
    ): "config mesh data_iterator goodput_recorder rampup_manager",
    (
        "maxtext.common.data_loader",
        "DataLoader",
    ): "config mesh data_iterator goodput_recorder",
    ("maxtext.common.checkpointing", "latest_step"): "checkpoint_manager",
}
# Keys that a ramp in one executable needs as they are here, with the reason.
NEEDED = {
    "enable_diloco": (False, "its batches have an axis of replicas"),
    **dict.fromkeys(
        ("ici_pipeline_parallelism", "dcn_pipeline_parallelism"),
        (1, "MaxText's pipeline splits a batch into microbatches of its own"),
    ),
    "use_tunix_gradient_accumulation": (
        False,
        "it divides each microbatch by its own tokens, also one without any",
    ),
    "training_objective": ("causal_lm", "other objectives have masks of their own"),
    "te_moe_block": (
        False,
        "it takes the smallest capacity of all microbatches, also of those that do"
        " not run",
    ),
    "expansion_factor_real_data": (
        -1,
        "the position of loaders that some hosts do not have is saved elsewhere",
    ),
    "colocated_python_data_input": (
        False,
        "the position of remote loaders is saved elsewhere",
    ),
    "elastic_enabled": (False, "its batches follow the devices that are alive"),
    "load_full_state_path": (
        "",
        "the place in the ramp follows from the checkpoints of the run itself",
    ),
}
# Keys with which `rampup.accumulate` gives MaxText's numbers. It needs `data` and
# `fsdp` as the only axes, too.
ACCUMULATED = {
    "shard_mode": "auto",
    "attention": "dot_product",
    "shard_optimizer_over_data": False,
    "num_experts": 1,
    "mtp_num_layers": 0,
    "use_indexer": False,
    "num_vocab_tiling": 1,
    "quantization": "",
    "dropout_rate": 0.0,
    "use_multimodal": False,
    "use_qk_clip": False,
    "record_internal_nn_metrics": 0,
    "parameter_memory_host_offload": False,
    "z_loss_multiplier": 0.0,
}
AUXILIARY = ("num_experts", "mtp_num_layers", "use_indexer")
# What MaxText returns as means over the microbatches of the buffer. All are 0 for a
# microbatch that does not run.
LOSSES = ("moe_lb_loss", "indexer_loss", "mtp_loss")
MEANS = (*LOSSES, "moe_max_load_ratio_mean")


def main(argv: Sequence[str]) -> None:
    """Run MaxText's pre-training with MaxText's command line: a program name, a file,
    and key=value.

    Raises:
        ConfigError: MaxText is of another version, or the keys ask for what a ramp in
            one executable does not have.
        ResumeMismatchError: the checkpoints of this run are of another ramp.
    """
    train = install()
    from absl import flags  # MaxText and Grain's worker processes read some

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(argv[:1])
    train.main(list(argv))


def install() -> Any:
    """Replace the three names of MaxText, and return the module whose `main` is to be
    run.

    Raises:
        MissingDependencyError: MaxText or a package that it needs is not installed.
        ConfigError: this version of MaxText has other names or arguments.
    """
    found: dict[str, Any] = {}
    if hasattr(sys.modules.get(TRAIN), "_rampup"):
        return sys.modules[TRAIN]
    for (module, name), arguments in NAMES.items():
        try:
            found[name] = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("maxtext."):
                raise MissingDependencyError(
                    "rampup.contrib.maxtext runs MaxText, but the package"
                    f" {error.name} is not installed",
                    fix=f"install maxtext=={VERSION} and what it needs",
                ) from None
            found[name] = None
        own = found[name] and [
            each for each in inspect.signature(found[name]).parameters if each != "self"
        ]
        if own != arguments.split() or (
            name == GRADIENTS and "scan" not in found[name].__code__.co_names
        ):
            here = importlib.import_module("maxtext").__version__
            raise ConfigError(
                f"{module}.{name}({arguments.replace(' ', ', ')}) of MaxText {VERSION}"
                f" is not in the installed version, {here}, or has changed",
                fix=f"rampup works with maxtext=={VERSION}",
            )
    train = importlib.import_module(TRAIN)
    utils = importlib.import_module(UTILS)
    maxtexts = found[GRADIENTS]

    def create_rampup_manager(
        config: Any, checkpoint_manager: Any
    ) -> RampupBatchManager | None:
        if not config.enable_rampup_batch_size:
            return None
        label = found["latest_step"](checkpoint_manager) if checkpoint_manager else None
        # MaxText writes the checkpoint with label s after s + 1 steps.
        manager = RampupBatchManager(config, 0 if label is None else label + 1)
        raise_together(list(problems(config, manager.ramp)))
        check_record(config, manager)
        return manager

    def create_dataloader(
        config: Any, mesh: Any, data_iterator: Any, recorder: Any, manager: Any
    ) -> Any:
        own = found["DataLoader"](config, mesh, data_iterator, recorder)
        if manager is None:
            return own
        if jax.process_index() == 0:
            print_plan(config, mesh, manager.ramp)
        # MaxText shows its speed from this step on. Its own count of the steps ignores
        # fractions of a sample per device.
        config.get_keys()["rampup_end_step"] = manager.total_rampup_steps
        return RampLoader(own, config, manager)

    def gradients(
        loss_fn: Any, config: Any, model: Any, *args: Any
    ) -> tuple[Any, Any, Any]:
        if not config.enable_rampup_batch_size:
            return maxtexts(loss_fn, config, model, *args)  # type: ignore[no-any-return]
        if choose_design(config, model.mesh)[0] == "accumulate":
            return accumulated_gradients(loss_fn, config, model, *args)
        return loop_gradients(maxtexts, loss_fn, config, model, *args)

    utils.create_rampup_manager = create_rampup_manager
    utils.create_dataloader = create_dataloader
    setattr(train, GRADIENTS, gradients)
    train._rampup = True
    return train


def problems(config: Any, ramp: BatchRamp) -> Iterator[ConfigError]:
    """Yield what a ramp in one executable does not have."""
    K, B = config.gradient_accumulation_steps, ramp.sizes[-1]
    if K < 2 or B % K:
        fitting = next(n for n in range(2, B + 1) if B % n == 0)
        yield ConfigError(
            f"gradient_accumulation_steps={K} is the number of microbatches of the"
            f" final batch of {B} samples, but a ramp in one executable needs 2 or"
            " more, of whole samples: a batch runs as many as it fills; set"
            f" gradient_accumulation_steps={fitting}, and the sizes per device so that"
            " the batches stay",
            key="gradient_accumulation_steps",
            nearest=(fitting,),
        )
        return
    for key, (needed, why) in NEEDED.items():
        if (value := value_of(config, key)) != needed:
            setting = f"{key}={str(needed).lower()}"
            yield ConfigError(
                f"{key}={value} excludes a ramp: {why}; set {setting}",
                key=key,
                nearest=(needed,),
            )
    partial = [size for size in ramp.sizes if size % (B // K)]
    for key in AUXILIARY:
        if partial and (value := value_of(config, key)) != ACCUMULATED[key]:
            yield ConfigError(
                f"with {key}={value}, every batch must be a multiple of the microbatch,"
                f" {B // K}, as padding would count in the auxiliary loss; the ramp has"
                f" {partial[0]}",
                key="per_device_batch_size_increment",
            )


def check_record(config: Any, manager: RampupBatchManager) -> None:
    """Keep the ramp beside the checkpoints of a new run, and refuse those of another
    ramp: the rows that they used differ.
    """
    if not config.enable_checkpointing:
        return
    file = epath.Path(config.checkpoint_dir).parent / "rampup.json"
    record = {
        "global_batch_size_to_load": config.global_batch_size_to_load,
        "ramp": manager.ramp.to_rows(),
    }
    if manager.step == 0:
        if jax.process_index() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record))
        return
    here = f"{config.checkpoint_dir} has checkpoints up to step {manager.step}"
    if not file.exists():
        raise ResumeMismatchError(
            f"{here}, but no ramp of rampup beside them; start the ramp with another"
            " run_name"
        )
    before = json.loads(file.read_text())
    if before != record:
        raise ResumeMismatchError(
            f"{here}, of a run that loads {before['global_batch_size_to_load']} rows at"
            f" once with another ramp; here {config.global_batch_size_to_load} are"
            f" loaded:\n{manager.ramp.differences(before['ramp'])}"
        )


def choose_design(config: Any, mesh: Any) -> tuple[str, str]:
    """Return the design of the gradients, `loop` or `accumulate`, and why."""
    if mesh.shape.get("data", 1) == 1:
        return "loop", "the data axis has one device, so there is no reduction to save"
    reasons = [
        f"{key}={value}"
        for key, needed in ACCUMULATED.items()
        if (value := value_of(config, key)) and value != needed
    ]
    if config.global_batch_size_to_load != config.global_batch_size_to_train_on:
        reasons.append(f"per_device_batch_size={config.per_device_batch_size}")
    reasons += [
        f"the mesh axis {name}"
        for name, size in mesh.shape.items()
        if size > 1 and name not in ("data", "fsdp")
    ]
    if reasons:
        return "loop", f"{reasons[0]} needs MaxText's own accumulation"
    return (
        "accumulate",
        "it reduces the gradients over the data axis once per step, not once per"
        " microbatch",
    )


def print_plan(config: Any, mesh: Any, ramp: BatchRamp) -> None:
    """Print the phases of the ramp, and the design with its reason."""
    console = Console()
    micro = ramp.sizes[-1] // config.gradient_accumulation_steps
    phases = [phase for phase in ramp.phases if phase.start_step < config.steps]
    # the first ones, and the last
    shown = phases[: MAX_PHASES - 1] + phases[MAX_PHASES - 1 :][-1:]
    titles = ("from step", "from sample", "global batch", f"microbatches of {micro}")
    rows = []
    for phase in shown:
        size = phase.global_batch_size
        numbers = (phase.start_step, phase.start_sample, size, -(-size // micro))
        rows.append([f"{number:,}" for number in numbers])
    design, why = choose_design(config, mesh)
    console.print(make_table(console, titles, rows))
    if hidden := len(phases) - len(shown):
        console.print(f"{format_count(hidden, 'phase')} before the last left out")
    console.print(
        f"rampup: one executable for all batches; design {design}: {why}",
        highlight=False,
        soft_wrap=True,
    )
    local = config.enable_emergency_checkpoint or config.enable_multi_tier_checkpointing
    if (
        config.enable_checkpointing
        and config.dataset_type != "synthetic"
        and (local or config.dataset_type != "grain")
    ):
        kind = "these checkpoints" if local else f"dataset_type={config.dataset_type}"
        console.print(
            f"rampup: MaxText saves no position in the data with {kind}: a resume"
            " begins with the first rows again"
        )


def loop_gradients(
    maxtexts: Callable[..., Any], loss_fn: Any, config: Any, *args: Any
) -> tuple[Any, Any, Any]:
    """Return loss, aux and gradients by MaxText's own function, whose scan ends after
    the last microbatch with a target.
    """
    number = jnp.int32(0)

    def scan(body: Any, init: Any, batch_KR: Any, length: int) -> tuple[Any, Any]:
        """Return what `jax.lax.scan` does if microbatches without a target change
        nothing and have results of 0.
        """
        nonlocal number
        number = num_microbatches(batch_KR)
        carry, results = jax.eval_shape(lambda: body(dict(init), take(batch_KR, 0)))
        # The Python numbers among the sums take the types that they have after the
        # first microbatch.
        sums = jax.tree.map(
            lambda x, s: x if isinstance(x, jax.Array) else jnp.asarray(x, s.dtype),
            dict(init),
            dict(carry),
        )
        zeros = jax.tree.map(lambda s: jnp.zeros((length, *s.shape), s.dtype), results)

        def run(i: jax.Array, state: Any) -> Any:
            sums, found = state
            sums, new = body(dict(sums), take(batch_KR, i))
            return sums, jax.tree.map(
                lambda all_, x: jax.lax.dynamic_update_index_in_dim(all_, x, i, 0),
                found,
                new,
            )

        return jax.lax.fori_loop(0, number, run, (sums, zeros))  # type: ignore[no-any-return]

    # MaxText's own code, in which `jax.lax.scan` is the function above. Its module
    # stays as it is.
    own = _With(jax, lax=_With(jax.lax, scan=scan))
    loss, aux, grads = types.FunctionType(
        maxtexts.__code__, {**maxtexts.__globals__, "jax": own}
    )(loss_fn, config, *args)
    ratio = config.gradient_accumulation_steps / jnp.maximum(number, 1)
    loss += (ratio - 1) * sum(aux[name] for name in LOSSES)
    return (
        loss,
        {
            name: value * ratio if name in MEANS else value
            for name, value in aux.items()
        },
        grads,
    )


def accumulated_gradients(
    loss_fn: Any,
    config: Any,
    model: Any,
    params: Any,
    params_shardings: Any,
    data: Any,
    dropout_rng: Any,
) -> tuple[Any, Any, Any]:
    """Return loss, aux and gradients by `rampup.accumulate`: summed in float32, and
    reduced over the data axis once.
    """
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    K = config.gradient_accumulation_steps
    # As MaxText does: row i of microbatch j is row i * K + j of the batch.
    batch_KR = jax.tree.map(
        lambda x: x.reshape(-1, K, *x.shape[1:]).swapaxes(0, 1), data
    )

    def sums(params: Any, batch_R: Any, keys_R: Any, rest: Any) -> tuple[Any, ...]:
        local = nnx.merge(graphdef, params, rest, copy=True)
        loss, aux = loss_fn(local, config, dict(batch_R), None, None, is_train=True)
        _, _, rest = nnx.split(local, nnx.Param, ...)
        # What the model has sown is of a microbatch; nothing that this design allows
        # reads it.
        aux = {
            **aux,
            "intermediate_outputs": {},
            "has_moe_overflow": jnp.int32(aux["has_moe_overflow"]),
        }
        return loss, aux["total_weights"], aux, rest

    found = accumulate(
        sums,
        params,
        batch_KR,
        num_microbatches(batch_KR),
        mesh=model.mesh,
        param_shardings=params_shardings,
        mutable=rest,
    )
    nnx.update(model, found.mutable)
    aux = {**found.aux, "has_moe_overflow": found.aux["has_moe_overflow"] > 0}
    return aux["xent_sum"] / jnp.maximum(found.weight, 1), aux, found.mean_grads(params)


def num_microbatches(batch_KR: Any) -> jax.Array:
    """Return the number of microbatches up to the last one with a target."""
    has_target = jnp.any(batch_KR["targets_segmentation"] != 0, axis=(1, 2))
    return jnp.max(
        jnp.where(has_target, jnp.arange(1, has_target.size + 1, dtype=jnp.int32), 0)
    )


class RampLoader:
    """Cuts the rows of MaxText's loader into the batches of a ramp, in a buffer of the
    final shape, and loses none.

    A checkpoint of MaxText has the state of its Grain iterator, after whole loaded
    batches. While rows of one are left, the state that is saved is the one before it;
    after a resume, its used rows are skipped.
    """

    def __init__(self, own: Any, config: Any, manager: RampupBatchManager) -> None:
        self.own, self.config, self.manager = own, config, manager
        self.input_data_shardings = own.input_data_shardings
        self.size = manager.global_batch_size_end
        self.loaded = config.global_batch_size_to_load
        self.held: Any = None  # a loaded batch whose rows are not all used
        self.skip = manager.total_used_samples % self.size  # its rows that are used
        self.before: Any = None  # the iterator's state before it
        # Reordered batches come from an iterator around the one that is saved.
        iterator = getattr(own.data_iterator, "data_iterator", own.data_iterator)
        source = getattr(iterator, "local_iterator", None)
        self.state_now: Callable[[], Any] | None = getattr(source, "get_state", None)
        if self.state_now is not None:
            source.get_state = lambda: (
                self.state_now() if self.held is None else self.before
            )
        self.fill = jax.jit(self._fill, out_shardings=own.input_data_shardings)

    def load_next_batch(self, rampup_manager: Any = None) -> Any:  # noqa: ARG002 - MaxText gives its manager
        """Return the next batch, and count it."""
        wanted = self.manager.global_batch_size_current
        first = self._load() if self.held is None else self.held
        second = self._load() if self.skip + wanted > self.size else first
        if wanted == self.size and self.skip == 0:
            batch = jax.device_put(first, self.input_data_shardings)
        else:
            # Only the first `size` of the rows that MaxText loads are to be trained on.
            rows = self.skip + np.arange(wanted)
            rows += (rows >= self.size) * (self.loaded - self.size)
            # MaxText takes row i * K + j of a batch as row i of microbatch j.
            K = self.config.gradient_accumulation_steps
            j, i = np.divmod(np.arange(wanted), self.size // K)
            index = np.full(self.loaded, -1, np.int32)
            index[i * K + j] = rows
            batch = self.fill(first, second, index)
        self.skip = (self.skip + wanted) % self.size
        self.held = second if self.skip else None
        self.manager.update()
        return batch

    def _load(self) -> Any:
        if self.state_now is not None:
            self.before = copy.deepcopy(self.state_now())
        return self.own.load_next_batch_pre_sharding()

    def _fill(self, first: Any, second: Any, index: jax.Array) -> Any:
        # With explicit axes, a gather has to say where its result is.
        where = (
            {"out_sharding": self.input_data_shardings}
            if value_of(self.config, "shard_mode") == "explicit"
            else {}
        )

        def take(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.concatenate([a, b]).at[jnp.maximum(index, 0)].get(**where)  # type: ignore[no-any-return]

        batch = jax.tree.map(take, first, second)
        return {
            **batch,
            "targets_segmentation": jnp.where(
                (index >= 0)[:, None], batch["targets_segmentation"], 0
            ),
        }


class _With:
    """A module in which some names have other values."""

    def __init__(self, module: Any, **others: Any) -> None:
        self.__dict__.update(others, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def value_of(config: Any, key: str) -> Any:
    """Return a value of MaxText's configuration, and that of an enumeration as text."""
    value = getattr(config, key)
    return getattr(value, "value", value)


if __name__ == "__main__":
    try:
        install()
        from absl import app  # MaxText's own way to start, which prints its log

        app.run(main)
    except RampupError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
