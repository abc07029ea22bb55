"""The contract of a loss: what a loss function takes and returns, its errors, and
`SummableLoss`, which a step calls.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rampup.engine.mesh import BatchAxes
from rampup.engine.sums import Recipe, Sums, differing_leaves
from rampup.errors import ConfigError, a_type

# loss_fn(params, batch, keys[, mutable]) -> (loss_sum, weight_sum, aux[, mutable]); see
# `rampup.engine.step.train_step`. That of `split_model` says in an attribute
# `has_streams` whether it draws from streams of its own, and leaves out dropout with
# `deterministic=True`.
LossFn = Callable[..., tuple[Any, ...]]
# (microbatches of a pass, passes), traced; a pass fills and drains the pipeline once. A
# step runs their product. Without stages, only the product matters.
Counts = tuple[jax.Array, jax.Array]


class SummableLoss:
    """A loss that adds itself up over the microbatches of a step. A subclass says how,
    in `sums`. To take `batch_axes`, be a dataclass with that field; to be bound to what
    a state has in `frozen`, or scaled, one with a field `loss_fn`.

    Attributes:
        batch_axes: the axes of the mesh that take the rows; None = data and fsdp.
        whole_batch: it sees all rows of a step, which is one microbatch.
        takes_whole: its `loss_fn` takes whole parameters, and the step chooses how the
            replicas of the mesh run it.
        reduce_once: see `train_step`. A loss that does not take whole parameters
            reduces gradients once per step, by itself.
        num_repeats: chunks of layers per pipeline stage, which must be those of the
            plan; None = of any number.
    """

    __slots__ = ()
    batch_axes: BatchAxes | None = None
    whole_batch: bool = False
    takes_whole: bool = False
    reduce_once: bool | None = True
    num_repeats: int | None = None

    def check(self, mesh: Mesh, engine: str) -> None:
        """Raise an error if this loss cannot run on a mesh, or with an engine.

        Args:
            mesh: the devices.
            engine: `fused` or `multi_steps`.
        """

    def sums(
        self,
        params: Any,
        rows: Any,
        counts: Counts,
        recipe: Recipe,
        mesh: Mesh,
        grad_shardings: Any = None,
    ) -> Sums:
        """Return the sums over the microbatches, with the gradient of the loss.

        If the recipe has `mutable` or `noise`, so have the sums. If it has a scale, the
        loss is scaled while it is differentiated, and the sums are as without one.

        Args:
            params: the parameters.
            rows: the batch and a random key per row, arrays (K, R, ...) for K
                microbatches of R rows.
            counts: microbatches of a pass, and passes; int32.
            recipe: what else to sum up, and how.
            mesh: the devices.
            grad_shardings: the shardings of the gradients: those of the parameters, or
                with ZeRO-1 of each replica's own part. None: no gradients, as in an
                evaluation, and `mutable` is read, not carried.

        Raises:
            NotImplementedError: a subclass has no `sums`.
        """
        raise NotImplementedError


def call_loss(
    loss_fn: LossFn,
    args: tuple[Any, ...],
    axes: tuple[Any, ...],
    *,
    keeps_mutable: bool = True,
) -> tuple[Any, Any, Any, Any]:
    """Return (loss_sum, weight_sum, aux, mutable or None) of a loss function, on a mesh
    of these axes, or refuse one that breaks its contract.
    """
    check_signature(loss_fn, len(args))
    try:
        results = loss_fn(*args)
    except (TypeError, ValueError, NameError) as error:
        if not _is_of_jax(error):
            raise
        # What JAX says does not name the contract.
        error.add_note(
            "In a loss, `keys` has one random key per row, so take jax.vmap over rows"
            " and keys, or keys[0]. The axes of the mesh are"
            f" {', '.join(map(str, axes))}, and a step adds up over the replicas by"
            " itself: leave out the collectives of a pmap, and of a shard_map `mesh=`,"
            " the axes of the replicas and those of one device, or give"
            " reduce_once=False. With reduce_once=True, one replica runs as several do"
        )
        raise
    return check_results(results, loss_fn, args, keeps_mutable=keeps_mutable)


def _is_of_jax(error: Exception) -> bool:
    """Return whether JAX raised an error, and not the loss itself. JAX takes its own
    frames out of a traceback, and then leaves a note.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    return module.startswith("jax.") or hasattr(error, "__notes__")


def check_results(
    results: Any, loss_fn: LossFn, args: tuple[Any, ...], *, keeps_mutable: bool = True
) -> tuple[Any, Any, Any, Any]:
    """Return the results of a loss function for some arguments as `call_loss` does, or
    refuse them.
    """
    carries = len(args) > 3
    loss, weight, aux, *carried = unpack_results(results, carries)
    for name, value, kind, types in (
        ("loss_sum", loss, "floating-point", (jnp.floating,)),
        ("weight_sum", weight, "real", (jnp.floating, jnp.integer)),
    ):
        if not jax.tree_util.all_leaves([value]):
            raise _contract_error(
                f"returned {a_type(value)} as {name}, which must be one number", carries
            )
        shape, dtype = np.shape(value), jnp.result_type(value)
        if shape or not any(jnp.issubdtype(dtype, own) for own in types):
            raise _contract_error(
                f"returned {dtype.name}{list(shape)} as {name}, which must be a {kind}"
                " scalar",
                carries,
            )
    for path, leaf in jax.tree.leaves_with_path(aux):
        if not hasattr(leaf, "dtype") and not isinstance(
            leaf, (bool, int, float, complex)
        ):
            name = f"aux{jax.tree_util.keystr(path)}"
            raise _contract_error(
                f"returned {a_type(leaf)} as {name}, which must be a number", carries
            )
    check_aux(
        aux,
        lambda rows: unpack_results(loss_fn(args[0], *rows, *args[3:]), carries)[2],
        args[1:3],
    )
    if carries and keeps_mutable:
        was, now = args[3], carried[0]
        changes = differing_leaves(
            was, now, lambda x: f"{jnp.result_type(x).name}{list(np.shape(x))}"
        )
        change = next(changes, None)
        if change or jax.tree.structure(was) != jax.tree.structure(now):
            name, old, new = change or ("it", *map(jax.tree.structure, (was, now)))
            raise _contract_error(
                f"changed the structure or a type of `mutable`: {name} was {old} and is"
                f" {new}",
                carries,
            )
    return loss, weight, aux, carried[0] if carries else None


def check_signature(loss_fn: Callable[..., Any], number: int = 3) -> None:
    """Refuse a loss function that does not take this number of arguments: 3, or 4 with
    `mutable`.
    """
    parameters = inspect.signature(loss_fn).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    least = sum(p.default is p.empty for p in positional)
    if not least <= number <= len(positional):
        raise _contract_error(
            f"cannot be called with {number} arguments, as it takes {len(positional)}",
            number > 3,
        )


def check_aux(aux: Any, aux_of: Callable[[Any], Any], rows: Any) -> None:
    """Refuse `aux` with a value for each of the `rows`: a dimension of their length
    that is twice as long for twice as many.
    """
    sizes = [size for leaf in jax.tree.leaves(aux) for size in np.shape(leaf) if size]
    R = jax.tree.leaves(rows)[0].shape[0] if sizes else 1
    if all(size % R for size in sizes):
        return
    twice = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2 * R, *x.shape[1:]), x.dtype), rows
    )
    try:
        other = dict(jax.tree.leaves_with_path(jax.eval_shape(aux_of, twice)))
    except Exception:  # noqa: BLE001 - a loss function for one number of rows; the step runs it with no other
        return
    for path, leaf in jax.tree.leaves_with_path(aux):
        if path in other and other[path].shape != np.shape(leaf):
            raise ConfigError(
                f"aux{jax.tree_util.keystr(path)} of the loss function has values for"
                f" single rows: its shape is {list(np.shape(leaf))} for {R} rows and"
                f" {list(other[path].shape)} for {2 * R}. A step adds aux up over the"
                " microbatches, so return sums over the rows, such as jnp.sum(x,"
                " axis=0)",
                key="loss_fn",
            )


def unpack_results(results: Any, carries: bool = False) -> tuple[Any, ...]:
    """Return the three results of a loss function, or four if it carries `mutable`, or
    refuse what is not that.
    """
    if not isinstance(results, (tuple, list)):
        is_array = np.isscalar(results) or hasattr(results, "shape")
        kind = (
            ("one array" if np.shape(results) else "a scalar")
            if is_array
            else a_type(results)
        )
        raise _contract_error(f"returned {kind} and not a tuple", carries)
    if len(results) != 3 + carries:
        raise _contract_error(
            f"returned {len(results)} results and not {3 + carries}", carries
        )
    return tuple(results)


def _contract_error(problem: str, carries: bool) -> ConfigError:
    more, why = (
        (", mutable", ", because the state has `mutable`") if carries else ("", "")
    )
    return ConfigError(
        f"the loss function {problem}. It takes (params, batch, keys{more}) and returns"
        f" (loss_sum, weight_sum, aux{more}){why}: sums over the rows of `batch`."
        " loss_sum is a floating-point scalar, weight_sum a scalar that counts what"
        " the loss is averaged over, such as tokens, and aux a pytree of further sums,"
        " such as {}. A loss that adds up several means, each with a weight of its own,"
        " sees all rows of a step, with plan.with_whole_batches()."
        " rampup.check_loss(loss_fn, state, rows) tells more",
        key="loss_fn",
    )
