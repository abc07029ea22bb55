"""Whether a training step can run on a state that it did not return; what it cannot run on is a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from rampup.engine.explicit import as_auto
from rampup.engine.mesh import BatchAxes, auto_context
from rampup.engine.state import check_state, shardings_of
from rampup.engine.totals import differing_leaves
from rampup.engine.zero import is_scattered, scattered_shardings
from rampup.errors import ConfigError, a_type


@dataclass(frozen=True, slots=True, kw_only=True)
class NewState:
    """A state that a training step did not return, and what decides whether the step can run on it.

    Attributes:
        state: the state.
        tx, mesh, donate: those of the step.
        axes: the axes of the rows, with the replicas of several devices, or of those that split the optimizer's state.
        is_first: the step has no programs yet. Later states must have the types and shapes that it compiled for.
        is_fused: the engine is `fused`.
        scatters: the replicas split the optimizer's state (ZeRO-1).
    """

    state: Any
    tx: Any
    mesh: Mesh
    axes: BatchAxes
    is_first: bool
    is_fused: bool
    donate: bool
    scatters: bool

    def check(self) -> int:
        """Refuse a state that the step cannot run on, or return its step number. That waits for the devices, once."""
        check_state(self.state)
        for problem, key, message in _STATE_PROBLEMS:
            if found := problem(self):
                nearest = ("fused",) if key == "gradient_accumulation" else ()
                raise ConfigError(message.format(found, new=self, state=self.state), key=key, nearest=nearest)
        return int(self.state.step)

    def other_optimizer(self) -> str | None:
        """Return how `opt_state` differs from that of the step's optimizer in its arrays and tuples, or None.

        Some optimizers run on the state of others, without an error.
        """
        if not self.is_first:
            return None
        try:
            with auto_context(self.mesh):
                expected = jax.eval_shape(self.tx.init, as_auto(self.state.params))
        except Exception:  # noqa: BLE001 - an `init` that looks at values cannot tell the shapes
            return None
        found = self.state.opt_state
        for name, want, have in differing_leaves(expected, found, np.shape):
            wanted, got = ("is absent" if shape is None else f"has the shape {list(shape)}" for shape in (want, have))
            return f"opt_state{name} {got} in the state, and {wanted} in the optimizer"
        parts = [jax.tree.structure(tree, is_leaf=lambda x: not isinstance(x, tuple)) for tree in (expected, found)]
        same = parts[0] == parts[1]
        return None if same else "its parts are others, such as those of a chain with more or fewer transformations"

    def on_one_device(self) -> str | None:
        """Return the name of an array that is not on the mesh."""
        shardings = jax.tree.leaves_with_path(shardings_of(self.state))
        outside = (path for path, sharding in shardings if isinstance(sharding, SingleDeviceSharding))
        return next(map(jax.tree_util.keystr, outside), None) if self.mesh.size > 1 else None

    def same_arrays(self) -> str | None:
        """Return the names of two leaves that are one array, which a step cannot donate to what each becomes."""
        names: dict[int, str] = {}
        for path, leaf in jax.tree.leaves_with_path(self.state) if self.donate else ():
            name = f"state{jax.tree_util.keystr(path)}"
            if (other := names.setdefault(id(leaf), name)) is not name:
                return f"{other} and {name}"
        return None

    def scattered_parameters(self) -> str | None:
        """Return the replicas over which parameters are sharded."""
        return " and ".join(self.axes.replica) if is_scattered(shardings_of(self.state.params), self.axes) else None

    def scattered_otherwise(self) -> bool:
        """Return whether the optimizer's state is not scattered as the step has it."""
        found = shardings_of(self.state.opt_state)
        if not self.scatters:
            return is_scattered(found, self.axes)
        return jax.tree.leaves(found) != jax.tree.leaves(scattered_shardings(self.state.opt_state, self.mesh, self.axes))


_OWN_TX = "make it with the `tx` of the step: create_state(params, step.tx, mesh)"
_AT = "the state is at step {state.step}, but its optimizer at microbatch {state.opt_state.mini_step} of step "
_AT += "{state.opt_state.gradient_step}"
# What a step cannot run on, in an order in which each may rely on those before it: the problem, which is what was found or
# false; the key; and the message, with {} for what was found.
# fmt: off
_STATE_PROBLEMS: tuple[tuple[Callable[[NewState], Any], str | None, str], ...] = (
    (lambda new: isinstance(new.state.step, jax.core.Tracer), None,
     "a TrainStep is compiled already; in a jitted function of your own, use rampup.accumulate"),
    (lambda new: isinstance(new.state.step, jax.Array) and new.state.step.is_deleted(), "state",
     "the state was donated to an earlier step; use the one that it returned, or train_step(..., donate=False)"),
    (lambda new: getattr(new.state, "tx", new.tx) != new.tx, "tx",
     "the state has another tx than the step; give the same optimizer to both, with engine='multi_steps' the `tx` of the "
     "step"),
    (lambda new: isinstance(new.state.opt_state, optax.MultiStepsState) is new.is_fused and a_type(new.state.opt_state), "tx",
     f"`opt_state` is {{}}, which is not what the engine of the step needs; {_OWN_TX}"),
    (NewState.other_optimizer, "tx", f"`opt_state` is not that of the step's optimizer: {{}}; {_OWN_TX}"),
    (NewState.on_one_device, "state",
     "state{} is on one device, and not on the mesh; place the state with rampup.prepare_state(state, mesh)"),
    (NewState.same_arrays, "state",
     "{} are one array, and a step donates each to what it becomes; copy one with jax.tree.map(jnp.copy, ...)"),
    (NewState.scattered_parameters, "shard_optimizer_over_data",
     "the parameters are sharded over {}, but every replica needs them whole; shard them over another axis such as fsdp, or "
     "only the optimizer's state, with shard_optimizer_over_data=True; or give train_step batch_axes=BatchAxes(replica=(), "
     "rows={new.axes.rows}): the compiler gathers them where it must"),
    (NewState.scattered_otherwise, "shard_optimizer_over_data",
     "the step has shard_optimizer_over_data={new.scatters}, but the optimizer's state is sharded in another way; give the "
     "same value to train_step and to create_state, prepare_state or split_model"),
    (lambda new: not new.is_fused and getattr(new.state, "dynamic_scale", None) is not None, "gradient_accumulation",
     "multi_steps runs one program per microbatch, but dynamic_scale adapts once per step; use the engine fused"),
    (lambda new: not new.is_fused and int(new.state.opt_state.mini_step) != 0, "state",
     f"{_AT}; go on with the state of a whole step"),
    (lambda new: not new.is_fused and int(new.state.opt_state.gradient_step) != int(new.state.step), "state",
     f"{_AT}; `step` and `opt_state.gradient_step` must be equal"),
)
# fmt: on
