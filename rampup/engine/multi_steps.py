"""`optax.MultiSteps` with a k that follows the ramp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rampup.engine.arguments import gone
from rampup.engine.optimizer import look_up, with_plan
from rampup.engine.state import check_step_number, refuse_multi_steps
from rampup.plan.plan import RampPlan


@gone(
    should_skip_update_fn=(
        "it makes optax.MultiSteps skip a microbatch without counting it, so all later"
        " optimizer steps would straddle two batches of the plan; use"
        " train_step(..., skip_nonfinite=True), or zero the gradient yourself"
    )
)
def multi_steps(
    tx: optax.GradientTransformation,
    plan: RampPlan,
    *,
    use_grad_mean: bool = True,
    accumulator_dtype: Any = None,
) -> optax.MultiSteps:
    """Return `optax.MultiSteps(tx, k)` with k = the plan's number of microbatches at
    every optimizer step.

    For a training step of your own that calls the optimizer once per microbatch. Unlike
    with the engine `fused`, every microbatch reduces its gradients over the data axis,
    runs the optimizer's arithmetic, and counts equally, however many tokens it has.
    Write checkpoints between optimizer steps: one within an accumulation cannot be
    resumed with another k. Their number is `opt_state.gradient_step`; the `step` of a
    linen `TrainState` counts microbatches. A microbatch that is not finite spoils its own step only,
    if the optimizer zeroes NaN (`optax.zero_nans`) or skips (`optax.apply_if_finite`).

    Args:
        tx: the optimizer of a whole step.
        plan: says how many microbatches every optimizer step has.
        use_grad_mean: average the microbatches' gradients, or with False add them up.
        accumulator_dtype: type of the accumulated gradients; None = that of Optax,
            float32 in newer versions.

    Returns:
        The `optax.MultiSteps`; its `init` and `update` are called once per microbatch.

    Raises:
        RampDefinitionError: the ramp takes 2**31 optimizer steps or more, which
            MultiSteps cannot count.
        ConfigError: in its `init`, `tx` has an `optax.MultiSteps` in it; in its
            `update`, the learning rate of `tx` follows another plan.
        TypeError: this Optax has no `accumulator_dtype`, or `should_skip_update_fn` is
            given, which would not count the microbatches that it skips.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:4 8:8"),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=10,
        ... )
        >>> tx = multi_steps(optax.sgd(0.1), plan)
        >>> [int(tx._every_k_schedule(jnp.int32(step))) for step in range(4)]
        [1, 1, 2, 2]
    """
    check_step_number(plan.ramp.ramp_steps)
    name, phases = "num_microbatches", plan.ramp.phases

    def every_k(gradient_step: jax.Array) -> jax.Array:
        return look_up(phases, gradient_step, plan.splits, {name: np.int32})[name]

    options = {"use_grad_mean": use_grad_mean}
    if accumulator_dtype is not None:
        options["accumulator_dtype"] = accumulator_dtype
    found = _MultiSteps(tx, every_k, **options)
    found.plan = plan
    return found


class _MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps` that forgets a microbatch that is not finite with its step.

    Optax multiplies by 0 what it does not emit, and what it has emitted. 0 * NaN is
    NaN: an optimizer that zeroes NaN, or skips them, would never move again.
    """

    plan: RampPlan

    def init(self, params: Any) -> Any:
        state = super().init(params)
        refuse_multi_steps(state.inner_opt_state)
        return state

    def update(
        self, updates: Any, state: Any, params: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        updates, state = with_plan(
            self.plan, super().update, updates, state, params, **extra_args
        )
        is_whole = state.mini_step == 0

        def zero_if(condition: Any, tree: Any) -> Any:
            return jax.tree.map(
                lambda x: jnp.where(condition, jnp.zeros_like(x), x), tree
            )

        sums = zero_if(is_whole, state.acc_grads)
        return zero_if(~is_whole, updates), state._replace(acc_grads=sums)
