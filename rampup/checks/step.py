"""Whether the compiled step is right on this machine: `check_step` runs the program of a
step, and the same rows without its loop and without its mesh.

Compilers have made wrong programs of loops that add up gradients. Here Python adds up
the gradients of the microbatches, each of its own call on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rampup.checks.trials import (
    coarsest,
    loss_function,
    mesh_of_one,
    norm,
    signs,
    trace,
)
from rampup.engine.accumulate import per_row_keys
from rampup.engine.batch import Batch
from rampup.engine.compile import compile_program
from rampup.engine.mesh import replicated
from rampup.engine.state import carried, replace_fields
from rampup.engine.step import TrainStep
from rampup.engine.sums import as_summed, fill, floating, sum_of_means
from rampup.engine.whole import operations
from rampup.errors import ConfigError

# What the matrix units of a chip may round their operands to.
_UNITS = {"tpu": 2.0**-8, "gpu": 2.0**-11, "cuda": 2.0**-11, "rocm": 2.0**-11}


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
            f"{self.name} {self.difference:.1g} ({self.tolerance:.1g} may be rounding)"
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
        what = f"the step of {self.num_microbatches} microbatches"
        if self.wrong:
            lines = "\n".join(f"- {parameter}" for parameter in self.wrong)
            return (
                f"{what} changes parameters otherwise than without loop and mesh:\n"
                f"{lines}"
            )
        worst = max(
            self.parameters,
            key=lambda p: p.difference / p.tolerance,
        )
        return f"{what} is that without loop and mesh; the largest difference: {worst}"


def check_step(
    step: TrainStep,
    state: Any,
    rows: Any,
) -> StepReport:
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
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(
                f"check_step cannot compare a step that {reason}; check one without, in"
                " a program of its own",
                key="step",
            )
    start = int(state.step)
    if not isinstance(rows, Batch):
        rows = next(step.batches(rows, start=start, stop=start + 1))
    copy = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding, may_alias=False),
        state,
    )
    found, _ = step(copy, rows)
    plain = _Plain(step, state, rows)
    before = _arrays(plain.state)
    own = _arrays(jax.device_get(found))
    right = _arrays(plain.step(plain.state))
    # Parameters as far from their own as the types round.
    other = plain.moved()
    moved_from, moved = _arrays(other), _arrays(plain.step(other))
    checks = []
    for name, value in before.items():
        change = right[name] - value
        size = norm(change) or 1.0
        # Rounding of the gradient, as it is amplified by the optimizer, and of the sum
        # of parameter and change.
        amplified = norm(moved[name] - moved_from[name] - change)
        tolerance = plain.epsilon**0.75 + 3 * amplified / size
        tolerance += plain.epsilon_of(name) * norm(value) / size
        difference = norm(own[name] - right[name]) / size
        checks.append(ParameterCheck(name, difference, tolerance))
    return StepReport(tuple(checks), rows.num_microbatches)


class _Plain:
    """A step without a loop and without a mesh."""

    def __init__(
        self,
        step: TrainStep,
        state: Any,
        batch: Batch,
    ) -> None:
        self._update = step._update
        self._segment = step.segment_of(batch.position.segment)
        self._mesh = mesh_of_one(jax.tree.leaves(state.params))
        self._loss_fn = loss_function(self._update.loss, "check_step")
        self.state = jax.device_get(state)
        number = batch.num_microbatches
        chunks = jax.device_get(batch.chunks)
        rows = jax.tree.map(
            lambda *x: np.concatenate(x)[:number],
            *chunks,
        )
        index = jnp.arange(
            number * batch.layout.num_rows,
            dtype=jnp.int32,
        )
        index = index.reshape(number, -1)
        keys = per_row_keys(self._update.key, self.state.step, index)
        words = np.asarray(jax.random.key_data(keys))
        # The rows that a call of the loss sees: those of one row shard and microbatch,
        # or all. A loss may draw from the first key of a part.
        size = batch.position.split.microbatch_size
        if getattr(self._update.loss, "whole_batch", False):
            size = index.size
        parts = jax.tree.map(
            lambda x: x.reshape(-1, size, *x.shape[2:]),
            (rows, words),
        )
        self._parts = [
            jax.tree.map(lambda x, n=n: x[n], parts) for n in range(index.size // size)
        ]
        self._programs: dict[Any, Any] = {}
        # Of the coarsest type of the loss, and of what the chip multiplies in.
        self.epsilon = _UNITS.get(jax.default_backend(), 0.0)

    def step(self, state: Any) -> Any:
        """Return the state after a step."""
        params = state.params
        sums = [self._run(self._sums, params, *part) for part in self._parts]
        losses, weights = jax.tree.map(lambda *x: sum(x), *sums)
        grads = [self._run(self._grads, params, *p, weights) for p in self._parts]
        mean = jax.tree.map(lambda *x: sum(x), *grads)
        new = self._run(
            self._update.run_optimizer,
            state,
            fill(mean, params),
            sum_of_means(losses, weights),
            self._segment,
        )
        return jax.device_get(new)

    def moved(self) -> Any:
        """Return the state with parameters as far from its own as the types round."""

        def move(x: Any) -> Any:
            pattern = signs(x.size, 1).reshape(x.shape)
            return x + (x * self.epsilon * pattern).astype(x.dtype)

        return replace_fields(
            self.state,
            params=jax.tree.map(move, self.state.params),
        )

    def epsilon_of(self, name: str) -> float:
        """Return that of the type of an array of the state."""
        return float(jnp.finfo(_leaves(self.state)[name].dtype).eps)

    def _sums(
        self,
        params: Any,
        batch: Any,
        words: Any,
    ) -> tuple[Any, Any]:
        """Return loss and weight of a part of the rows."""
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        frozen = getattr(self.state, "frozen", None)
        options = {} if frozen is None else {"frozen": frozen}
        loss, weight, *_ = self._loss_fn(params, batch, keys, **options)
        return jax.tree.map(as_summed, (loss, weight))

    def _grads(
        self,
        params: Any,
        batch: Any,
        words: Any,
        weights: Any,
    ) -> Any:
        """Return the gradient of the part of a mean that these rows have."""

        def mean(trained: Any) -> Any:
            losses, _ = self._sums(fill(trained, params), batch, words)
            return sum_of_means(losses, weights)

        return jax.tree.map(
            as_summed,
            jax.grad(mean)(floating(params, params)),
        )

    def _run(self, function: Any, *args: Any) -> Any:
        """Run a function on one device."""
        args = jax.device_put(args, replicated(self._mesh))
        name = function.__name__
        if name not in self._programs:
            traced = trace(function, self._mesh, args)
            self.epsilon = max(
                self.epsilon,
                coarsest(list(operations(traced.jaxpr))),
            )
            self._programs[name] = compile_program(traced.lower())
        return self._programs[name](*args)


def _leaves(state: Any) -> dict[str, np.ndarray]:
    """Return the floating-point arrays of parameters and optimizer by name."""
    tree = {"params": state.params, "opt_state": state.opt_state}
    return {
        path[0].key + jax.tree_util.keystr(path[1:]): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def _arrays(state: Any) -> dict[str, np.ndarray]:
    """Return these arrays as vectors of float64."""
    return {
        name: np.asarray(leaf, np.float64).ravel()
        for name, leaf in _leaves(state).items()
    }
