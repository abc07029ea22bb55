"""Training loops as Flax's own examples have them, wrapped with few changed lines."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax  # noqa: F401 - the examples use it
import pytest
from flax import linen, nnx
from flax.training import train_state

import rampup


class Net(nnx.Module):
    """A network with batch statistics, dropout and LoRA, of which each example uses a part."""

    def __init__(self, rngs, *, lora=False):
        make = (lambda *sizes, rngs: nnx.LoRALinear(*sizes, lora_rank=2, rngs=rngs)) if lora else nnx.Linear
        self.hidden, self.out = make(2, 32, rngs=rngs), make(32, 1, rngs=rngs)

    def __call__(self, x):
        """Return one number per row."""
        return self.out(nnx.relu(self.hidden(x)))[:, 0]


class LinenNet(linen.Module):
    """A linen network with batch statistics."""

    @linen.compact
    def __call__(self, x, train):
        """Return one number per row."""
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(32)(x))
        return linen.Dense(1)(linen.relu(x))[:, 0]


class BatchStatsState(train_state.TrainState):
    """The state of Flax's ImageNet example."""

    batch_stats: dict


ROWS = [{"x": np.float32([n % 7, n % 5]), "y": np.float32(n % 7 - n % 5)} for n in range(640)]


def loader():
    """Yield batches of a constant size, as the examples' input pipelines do."""
    for first in range(0, len(ROWS), 16):
        yield jax.tree.map(lambda *x: np.stack(x), *ROWS[first : first + 16])


NNX_OPTIMIZER = """
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    losses = []
    for batch in loader():
        losses.append(train_step(model, optimizer, batch))
"""
LINEN_BATCH_STATS = """
    net, tx = LinenNet(), optax.adam(0.05)
    variables = net.init(jax.random.key(0), jnp.ones((1, 2)), train=False)
    state = BatchStatsState.create(apply_fn=net.apply, tx=tx, **variables)

    def loss_fn(params, batch, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        y, updates = net.apply(variables, batch["x"], train=True, mutable=["batch_stats"])
        loss = jnp.mean((y - batch["y"]) ** 2)
        return loss, updates["batch_stats"]

    @jax.jit
    def train_step(state, batch):
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, batch_stats), grads = grad_fn(state.params, batch, state.batch_stats)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}

    losses = []
    for batch in loader():
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
"""
LORA = """
    model, tx = Net(nnx.Rngs(0), lora=True), optax.adam(0.05)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

    def loss_fn(model, batch):
        errors = (model(batch["x"]) - batch["y"]) ** 2
        return jnp.mean(errors)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, grads)
        return loss

    losses = []
    for batch in loader():
        losses.append(train_step(model, optimizer, batch))
"""
EXAMPLES = {
    "nnx_optimizer": (
        NNX_OPTIMIZER,
        [
            ("optax.adam(0.05), wrt", "rampup.multi_steps(optax.adam(0.05), plan), wrt"),
            ("in loader():", "in rampup.microbatches(ROWS, plan, mesh):"),
        ],
        2,
    ),
    "linen_batch_stats": (
        LINEN_BATCH_STATS,
        [
            ("    state = BatchStatsState.create(apply_fn=net.apply, tx=tx, **variables)",
             "    state = rampup.prepare_state(BatchStatsState.create(apply_fn=net.apply, tx=tx, **variables), mesh)"),
            ("def loss_fn(params, batch, batch_stats):", "def loss_fn(params, batch, keys, batch_stats):"),
            ("loss = jnp.mean((y - batch", "loss = jnp.sum((y - batch"),
            ('return loss, updates["batch_stats"]', 'return loss, y.size, {}, updates["batch_stats"]'),
            (LINEN_BATCH_STATS[LINEN_BATCH_STATS.index("    @jax.jit") : LINEN_BATCH_STATS.index("\n    losses = []")],
             "    train_step = rampup.train_step(loss_fn, tx, plan, mesh)\n"),
            ("in loader():", "in train_step.batches(ROWS):"),
        ],
        6,
    ),
    "lora": (
        LORA,
        [
            ("def loss_fn(model, batch):", "def loss_fn(model, batch, keys):"),
            ("return jnp.mean(errors)", "return jnp.sum(errors), errors.size, {}"),
            ("    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)\n\n", ""),
            (LORA[LORA.index("    @nnx.jit") : LORA.index("\n    losses = []")],
             "    state, loss_fn = rampup.split_model(model, loss_fn, tx, mesh, wrt=nnx.LoRAParam)\n"
             "    train_step = rampup.train_step(loss_fn, tx, plan, mesh)\n"),
            ("in loader():", "in train_step.batches(ROWS):"),
            ("        losses.append(train_step(model, optimizer, batch))\n",
             "        state, metrics = train_step(state, batch)\n"
             '        losses.append(metrics["loss"])\n    rampup.merge_model(model, state)\n'),
        ],
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_wrapped_with_few_changed_lines(name):
    """A loop of Flax's examples and its wrapped version train; few lines are new (deleted ones are not counted)."""
    original, changes, expected = EXAMPLES[name]
    wrapped = original
    for before, after in changes:
        assert before in wrapped, before
        wrapped = wrapped.replace(before, after)
    assert len(set(wrapped.splitlines()) - set(original.splitlines())) == expected
    d = jax.device_count()
    plan = rampup.RampPlan(
        ramp=rampup.BatchRamp.from_schedule(f"0:{8 * d} {80 * d}:{16 * d}"),
        splitter=rampup.BatchSplitter(data_parallel_size=d, microbatch_size=8),
        num_devices=d,
        total_steps=40,
    )
    for code in (original, wrapped):
        scope = globals() | {"plan": plan, "mesh": rampup.make_mesh()}
        exec(textwrap.dedent(code), scope)
        assert scope["losses"][-1] < 0.5 * scope["losses"][0]
    if name == "linen_batch_stats":
        assert float(jnp.abs(scope["state"].batch_stats["BatchNorm_0"]["mean"]).sum()) > 0
