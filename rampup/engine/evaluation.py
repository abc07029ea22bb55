"""The evaluation step: the sums of losses and weights over a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rampup.engine.accumulate import summable
from rampup.engine.arguments import BATCHED_GONE, OPTIONS_OF_LOSS_GONE, gone
from rampup.engine.batch import Batch, check_batch
from rampup.engine.compile import Compiler
from rampup.engine.contract import LossFn, SummableLoss
from rampup.engine.explicit import as_auto, sees_explicit, with_explicit_axes
from rampup.engine.mesh import STAGE, BatchAxes, auto_context, auto_view, replicated
from rampup.engine.state import check_placed, read_by_loss, shardings_of
from rampup.engine.update import eval_sums
from rampup.errors import ConfigError


class EvalStep:
    """A compiled evaluation step: sums loss and weight over a batch. It takes the same
    loss function as `train_step`.

    The loss of an NNX model that `split_model` returns has the mode of that call: split the
    model again after `model.eval()`.

    Args:
        loss_fn, mesh, reduce_once: see `train_step`. An `AccumulatedLoss` chooses the
            axes of the rows, or sees whole batches, which are then one microbatch. The
            keys of a row follow its place among all rows that are evaluated, and are
            the same every time.
        check_loss: warn with the first batch of a loss that is not a sum over rows, as
            `train_step` does: a mean would be added up as if it were one.

    Raises:
        ConfigError: the loss cannot run on the mesh.
        TypeError: an argument that is gone.

    Example:
        >>> import optax
        >>> from rampup import create_state, make_mesh
        >>> mesh = make_mesh(devices=jax.devices()[:1])
        >>> evaluate = EvalStep(
        ...     lambda params, batch, keys: (
        ...         ((batch - params) ** 2).sum(),
        ...         len(keys),
        ...         {},
        ...     ),
        ...     mesh,
        ... )
        >>> state = create_state(np.float32(1), optax.sgd(0.1), mesh)
        >>> sums = [
        ...     evaluate(state, batch) for batch in evaluate.batches(np.arange(7.0), 3)
        ... ]
        >>> [(float(loss), int(weight)) for loss, weight in sums]
        [(2.0, 3), (29.0, 3), (25.0, 1)]
    """

    @gone(**OPTIONS_OF_LOSS_GONE)
    def __init__(
        self,
        loss_fn: LossFn | SummableLoss,
        mesh: Mesh,
        *,
        reduce_once: bool | None = None,
        check_loss: bool = True,
    ) -> None:
        self._loss_fn, self._mesh = loss_fn, mesh
        self._loss = summable(loss_fn, mesh, reduce_once=reduce_once)
        self._checks_loss = check_loss and not self._loss.whole_batch
        self._axes = BatchAxes.of(mesh, self._loss.batch_axes)
        self._compiler = Compiler(mesh)

    def __call__(self, state: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return the sums of a batch. Batches of one size share a program.

        Args:
            state: the training state, on the mesh; it stays as it is.
            batch: a `Batch` of one step, such as those of `batches`.

        Returns:
            The sum of losses and the sum of weights, scalars on the devices.

        Raises:
            ConfigError: the state was donated, or is not on the mesh.
            DataError: this is no `Batch`.
        """
        check_batch(batch)
        check_placed(state)
        # The keys of a row follow its place among all rows, which is an int32 here.
        place = np.int32(batch.position.consumed_samples % 2**31)
        args = state, batch.chunks, np.int32(batch.num_microbatches), place
        # The rows that are left over are on every device, as if the mesh had no axes
        # for rows; see `batches`.
        sharding = jax.tree.leaves(batch.chunks)[0].sharding
        is_left = self._axes.num_shards(self._mesh) > 1 and sharding.is_fully_replicated

        def lower() -> Any:
            loss, view = self._loss, auto_view(self._mesh)
            if is_left:
                nowhere = BatchAxes(replica=(), rows=())
                loss = summable(self._loss_fn, self._mesh, nowhere)
            seen = as_auto(args)
            if sees_explicit(self._loss, self._mesh):
                shardings = read_by_loss(shardings_of(seen[0]))
                loss = with_explicit_axes(loss, view, *shardings)
            with auto_context(self._mesh):
                run = jax.jit(
                    functools.partial(eval_sums, loss, view),
                    out_shardings=replicated(self._mesh),
                )
                return run.lower(*seen)

        run = self._compiler.get((batch.layout, len(batch.chunks), is_left), lower)
        if self._checks_loss:
            from rampup.checks.loss import warn_of_loss

            warn_of_loss(self._loss, state, batch)
            self._checks_loss = False
        return run(*args)

    @gone(batched=BATCHED_GONE)
    def batches(self, source: Any, batch_size: int) -> Iterator[Batch]:
        """Yield all rows of a source once, in order: batches of `batch_size` rows, then
        what is left over.

        That is at most two batches with programs of their own: as many rows as all
        replicas can share, and the rest, which every device computes. `batch_size` is a
        multiple of the devices that share the rows.

        Args:
            source: the rows; see `step_batches`.
            batch_size: rows of a batch.

        Raises:
            ConfigError: the mesh has pipeline stages.
        """
        if self._mesh.shape.get(STAGE, 1) > 1:
            raise ConfigError(
                "EvalStep.batches cuts rows for a mesh without pipeline stages",
                fix="take step_batches(source, plan, mesh) of a plan with a constant"
                " batch and the stages",
                key="ici_pipeline_parallelism",
                nearest=(1,),
            )
        from rampup.data.batches import eval_batches

        place = 0
        for batch in eval_batches(
            source,
            batch_size,
            self._mesh,
            batch_axes=self._axes,
            whole_batch=self._loss.whole_batch,
        ):
            # The batches that are left over have plans of their own.
            position = dataclasses.replace(batch.position, consumed_samples=place)
            place += position.split.global_batch_size
            yield batch._replace(position=position)
