"""Whether the compiled step is right on this machine: `check_step` runs the program of a
step, and the same rows without its loop and without its mesh.

Compilers have made wrong programs of loops that add up gradients. Here Python adds up
the gradients of the microbatches, each of its own call on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rampup.checks.trials import OneDevice, is_real, loss_function, norm, signs
from rampup.engine.batch import Batch
from rampup.engine.keys import per_row_keys
from rampup.engine.optimizer import segment_numbers
from rampup.engine.state import carried, replace_fields
from rampup.engine.step import TrainStep
from rampup.engine.sums import Sums, as_summed
from rampup.errors import ConfigError
from rampup.plan.describe import format_count

# What the matrix units of a chip may round their operands to.
_UNITS = {"tpu": 2.0**-8, "gpu": 2.0**-11}


class ParameterCheck(NamedTuple):
    """How the change of an array of the state in a step differs from that without loop
    and mesh.

    Attributes:
        name: of a parameter, or of an array of the optimizer, which shows more: the first
            step of Adam changes parameters by the sign of their gradient.
        difference: norm of the difference over that of the change.
        tolerance: how much of it may be rounding.
    """

    name: str
    difference: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.name} by {self.difference:.1g} of its change (up to"
            f" {self.tolerance:.1g} may be rounding)"
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """What `check_step` found. True if every parameter is right but for rounding.

    Attributes:
        parameters: a `ParameterCheck` for each array of `params` and `opt_state`.
        num_microbatches: how many the step added up.

    Example:
        >>> report = StepReport((ParameterCheck("params['w']", 0.5, 1e-5),), 4)
        >>> bool(report), report.wrong[0].name
        (False, "params['w']")
    """

    parameters: tuple[ParameterCheck, ...]
    num_microbatches: int

    @property
    def wrong(self) -> tuple[ParameterCheck, ...]:
        """The parameters that differ by more than rounding, or are not finite."""
        return tuple(p for p in self.parameters if not p.difference <= p.tolerance)

    def __bool__(self) -> bool:
        return not self.wrong

    def __str__(self) -> str:
        what = f"the step of {format_count(self.num_microbatches, 'microbatch')}"
        if self.wrong:
            lines = "".join(f"\n- {parameter}" for parameter in self.wrong)
            return f"{what} is not that without loop and mesh:{lines}"
        worst = max(self.parameters, key=lambda p: p.difference / p.tolerance)
        return f"{what} is that without loop and mesh; the largest difference: {worst}"


def check_step(step: TrainStep, state: Any, rows: Any) -> StepReport:
    """Compare the compiled step on this machine with the same rows without a loop and
    without a mesh, parameter by parameter.

    Args:
        step: of the engine `fused`, for a state without `mutable`.
        state: the training state. It stays as and where it is: the step runs on a copy,
            and one device takes two more.
        rows: the source of the run, of which the batch of step `state.step` is taken,
            or a `Batch` of it.

    Returns:
        A `StepReport`, true if every parameter is right but for rounding.

    Raises:
        ConfigError: the step cannot be compared.

    Example:
        >>> from rampup import (
        ...     BatchRamp,
        ...     BatchSplitter,
        ...     RampPlan,
        ...     create_state,
        ...     make_mesh,
        ...     train_step,
        ... )
        >>> import optax
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:8"),
        ...     splitter=BatchSplitter(data_parallel_size=1, microbatch_size=2),
        ...     num_devices=1,
        ...     total_steps=2,
        ... )
        >>> step = train_step(
        ...     lambda p, batch, keys: (((p - batch) ** 2).sum(), len(keys), {}),
        ...     optax.sgd(0.1),
        ...     plan,
        ...     mesh,
        ... )
        >>> bool(
        ...     check_step(
        ...         step, create_state(np.float32(1), step.tx, mesh), np.arange(16.0)
        ...     )
        ... )
        True
    """
    reasons = {
        "runs in several processes": jax.process_count() > 1,
        "has the engine multi_steps": step.chunk_size is not None,
        "has a state with `mutable`": carried(state) is not None,
        "has a `dynamic_scale`": getattr(state, "dynamic_scale", None) is not None,
    }
    for reason in filter(reasons.get, reasons):
        raise ConfigError(
            f"check_step cannot compare a step that {reason}; check one without, in"
            " a program of its own",
            key="step",
        )
    if not isinstance(rows, Batch):
        start = int(state.step)
        rows = next(step.batches(rows, start=start, stop=start + 1))
    device = OneDevice(jax.tree.leaves(state.params))
    plain = _plain_step(step, state, rows, device)
    copy = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)
    before, own = _arrays(state), _arrays(step(copy, rows)[0])
    right = _arrays(plain(state))
    # What may be rounding: parameters that differ from their own as little as the
    # coarsest type can tell change otherwise too, by what the optimizer makes of it.
    epsilon = max(device.coarsest, _UNITS.get(jax.default_backend(), 0.0))
    params = jax.tree.map(
        lambda x: x + (x * epsilon * signs(x, 1)).astype(x.dtype), state.params
    )
    near = replace_fields(state, params=params)
    before_near, right_near = _arrays(near), _arrays(plain(near))
    checks = []
    for name, value in before.items():
        change = right[name] - value
        size = norm(change) or 1.0
        difference = norm(own[name] - right[name]) / size
        rounded = norm(right_near[name] - before_near[name] - change) / size
        checks.append(ParameterCheck(name, difference, epsilon**0.75 + 3 * rounded))
    return StepReport(tuple(checks), rows.num_microbatches)


def _plain_step(
    step: TrainStep, state: Any, batch: Batch, device: OneDevice
) -> Callable[[Any], Any]:
    """Return the function from a state to that after a step without a loop and a mesh:
    Python adds up the parts of the batch, the rows that a call of the loss sees. Those
    are the rows of one shard and microbatch, or all: a loss may draw from their first
    key.
    """
    update, number = step._update, batch.num_microbatches * batch.layout.num_rows
    size = batch.position.split.microbatch_size
    if update.loss.whole_batch:
        size = number
    index = jnp.arange(number, dtype=jnp.int32).reshape(-1, size)
    words = jax.random.key_data(per_row_keys(update.key, state.step, index))

    def in_parts(*chunks: jax.Array) -> np.ndarray:
        rows = np.concatenate(chunks)
        return rows.reshape(-1, size, *rows.shape[2:])

    every = jax.tree.map(in_parts, *batch.chunks), np.asarray(words)
    parts = [jax.tree.map(lambda x, n=n: x[n], every) for n in range(len(index))]

    def sums_of(state: Any, rows: Any, words: Any) -> Sums:
        """Return gradient, loss and weight of a part."""
        loss_fn = loss_function(update.bound_loss(state), "check_step")
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")

        def loss_of(params: Any) -> tuple[Any, Any]:
            return loss_fn(params, rows, keys)[:2]

        (loss, weight), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return jax.tree.map(as_summed, Sums(grads, loss, weight, None))

    def run(state: Any) -> Any:
        found = [device.run(sums_of, state, *part) for part in parts]
        sums: Sums = jax.tree.map(lambda *x: sum(x), *found)
        segment = segment_numbers(step.tx, batch.position.segment)
        return device.run(
            update.run_optimizer, state, sums.mean_grads(), sums.mean_loss, segment
        )

    return run


def _arrays(state: Any) -> dict[str, np.ndarray]:
    """Return the floating-point arrays of parameters and optimizer, as vectors."""
    tree = {"params": state.params, "opt_state": state.opt_state}
    return {
        path[0].key + jax.tree_util.keystr(path[1:]): np.asarray(x, np.float64).ravel()
        for path, x in jax.tree.leaves_with_path(tree)
        if is_real(x.dtype)
    }
