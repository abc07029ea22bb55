# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: grow the batch of your Flax training step
#
# Large models are often trained with small batches first and large batches later. Early in training, small batches
# waste fewer samples. Later, large batches waste few, too, and take fewer steps. *rampup* plans this growth before the first
# step, checks it, and runs it with one compiled program. This notebook adds a ramp to an ordinary Flax training step
# in three ways:
#
# 1. **Batch sizes only.** You ask how large the next batch is.
# 2. **Your step, fixed microbatches.** Your jitted step does not change and compiles once.
# 3. **`train_step`.** One call is one optimizer step, and every unit of weight counts the same.
#
# On a CPU it takes about a minute; it has not been run on a TPU or a GPU yet.

# %% tags=["install"]
# @title Install
import importlib.metadata
import tempfile
from pathlib import Path

packages = {
    package.name: package.version for package in importlib.metadata.distributions()
}
if "rampup" not in packages:
    # The repository: here, in a folder above, or in one folder below; or its wheel.
    here = Path.cwd()
    folders = [here, *here.parents, *sorted(path for path in here.iterdir())]
    found = [folder for folder in folders if (folder / "rampup" / "plan").is_dir()]
    found += sorted(here.glob("rampup-*.whl"), reverse=True)
    if not found:
        raise RuntimeError(
            f"rampup is not installed; copy its repository or its wheel into {here},"
            " and run this cell again"
        )
    source = f"{found[0]}[plot]"
    # Keep the versions of JAX and of the accelerator's driver that this machine has.
    kept = [
        f"{name}=={version}"
        for name, version in packages.items()
        if name.startswith("jax") or name == "libtpu"
    ]
    constraints = Path(tempfile.mkdtemp()) / "constraints.txt"
    constraints.write_text("\n".join(kept))
    # %pip install -q -c {constraints} "{source}"

# %%
# @title What this machine has
# %matplotlib inline
import time

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from matplotlib import pyplot as plt

import rampup
from rampup.show.figures import draw_batch

found = jax.devices()
print(
    f"found {len(found)} device(s): {found[0].platform.upper()}, {found[0].device_kind}"
)
print(
    f"jax {jax.__version__}, flax {flax.__version__}, optax {optax.__version__}, rampup"
    f" {rampup.__version__}"
)

# %% [markdown]
# ## Plan the ramp
#
# Change the numbers and run the next two cells again. If a batch cannot be split evenly, the error names the nearest
# numbers that can.

# %%
# @title The ramp, in samples per device
START = 8  # @param {type:"integer"}
INCREMENT = 8  # @param {type:"integer"}
END = 32  # @param {type:"integer"}
RAMP_SAMPLES_PER_DEVICE = 720  # @param {type:"integer"}
STEPS = 150  # @param {type:"integer"}

devices = jax.device_count()
plan = rampup.RampPlan(
    ramp=rampup.BatchRamp.linear(
        start=START * devices,
        increment=INCREMENT * devices,
        end=END * devices,
        samples=RAMP_SAMPLES_PER_DEVICE * devices,
    ),
    splitter=rampup.BatchSplitter(data_parallel_size=devices),
    num_devices=devices,
    total_steps=STEPS,
)
plan

# %% [markdown]
# The microbatch keeps its size, so JAX compiles for one shape. The number of *passes* per step grows.

# %%
draw_batch(plan)

# %% [markdown]
# ## An existing training step
#
# A small network learns to distinguish two intertwined spirals. First with Flax linen.

# %%
rng = np.random.default_rng(0)
angle, side = 2 * np.pi * np.sqrt(rng.random(4096)), rng.integers(0, 2, 4096)
radius = angle / (2 * np.pi) * np.where(side, 1, -1)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1) + rng.normal(
    0, 0.02, (4096, 2)
)
rows = [
    {"x": x, "y": y}
    for x, y in zip(points.astype(np.float32), side.astype(np.int32), strict=True)
]
mesh = rampup.make_mesh()


class Net(linen.Module):
    """A network of three layers."""

    @linen.compact
    def __call__(self, x):
        """Return two scores per row."""
        x = linen.gelu(linen.Dense(64)(3 * x))
        x = linen.gelu(linen.Dense(64)(x))
        return linen.Dense(2)(x)


def make_step():
    """Return an ordinary jitted training step, which knows nothing about ramps."""

    @jax.jit
    def your_step(state, batch):
        def loss_fn(params):
            scores = state.apply_fn(params, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(
                scores, batch["y"]
            ).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return your_step


net = Net()
params = net.init(jax.random.key(0), jnp.ones((1, 2)))
curves = {}

# %% [markdown]
# ### 1. Batch sizes only
#
# The manager has the constructor and the attributes of MaxText's class. It says how large the next batch is, and
# nothing else changes. Note the last line: JAX compiled the step once for every batch size.

# %%
manager = rampup.RampupBatchManager.from_plan(plan)
your_step = make_step()
state = rampup.prepare_state(
    TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(0.005)), mesh
)
curve, first = [], 0
began = time.perf_counter()
for _ in range(STEPS):
    size = manager.global_batch_size_current
    picked = [rows[row % len(rows)] for row in range(first, first + size)]
    batch = {name: np.stack([row[name] for row in picked]) for name in ("x", "y")}
    state, loss = your_step(state, batch)
    first += size
    manager.update()
    curve.append((first, float(loss)))
curves["sizes only, linen"] = curve
print(
    f"loss {curve[-1][1]:.3f} after {first:,} samples,"
    f" {time.perf_counter() - began:.1f} s"
)
print(f"programs compiled: {your_step._cache_size()}")

# %% [markdown]
# ### 2. Your step, fixed microbatches
#
# `multi_steps` returns an `optax.MultiSteps` whose number of microbatches follows the plan. `microbatches` yields
# microbatches of one shape. The step is the same function and compiles once.


# %%
def updates(losses):
    """Return (samples, mean loss) of each optimizer step, from the losses of its
    microbatches.
    """
    losses, curve = iter(losses), []
    for step in range(plan.total_steps):
        position = plan.position(step)
        mean = np.mean(
            [float(next(losses)) for _ in range(position.split.num_microbatches)]
        )
        curve.append(
            (position.consumed_samples + position.split.global_batch_size, mean)
        )
    return curve


your_step = make_step()
tx = rampup.multi_steps(optax.adam(0.005), plan)
state = rampup.prepare_state(
    TrainState.create(apply_fn=net.apply, params=params, tx=tx), mesh
)
began, losses = time.perf_counter(), []
for batch in rampup.microbatches(rows, plan, mesh):
    state, loss = your_step(state, batch)
    losses.append(loss)
curves["microbatches, linen"] = updates(losses)
print(
    f"loss {curves['microbatches, linen'][-1][1]:.3f}, {len(losses)} microbatches,"
    f" {time.perf_counter() - began:.1f} s"
)
print(
    f"optimizer steps: {int(state.opt_state.gradient_step)}, programs compiled:"
    f" {your_step._cache_size()}"
)

# %% [markdown]
# The same with Flax NNX. Again, only the optimizer and the loop know the plan.


# %%
class NnxNet(nnx.Module):
    """The same network."""

    def __init__(self, rngs):
        self.first, self.second = (
            nnx.Linear(2, 64, rngs=rngs),
            nnx.Linear(64, 64, rngs=rngs),
        )
        self.last = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, x):
        """Return two scores per row."""
        return self.last(nnx.gelu(self.second(nnx.gelu(self.first(3 * x)))))


def cross_entropy(model, batch):
    """Return the loss of each row."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["y"]
    )


@nnx.jit
def your_nnx_step(model, optimizer, batch):
    """Train one microbatch."""
    loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model, batch).mean())(
        model
    )
    optimizer.update(model, grads)
    return loss


model = NnxNet(nnx.Rngs(0))
optimizer = nnx.Optimizer(
    model, rampup.multi_steps(optax.adam(0.005), plan), wrt=nnx.Param
)
curves["microbatches, NNX"] = updates(
    [
        your_nnx_step(model, optimizer, batch)
        for batch in rampup.microbatches(rows, plan, mesh)
    ]
)
print(f"loss {curves['microbatches, NNX'][-1][1]:.3f}")

# %% [markdown]
# ### 3. `train_step`
#
# `train_step` takes a loss function that returns a sum over rows and the weight of that sum. It sums gradients in
# float32 and reduces them over the devices once per optimizer step. Every row (or token) has the same weight. One
# call is one optimizer step.


# %%
def loss_fn(model, batch, keys):
    """Return the sum of the losses, its weight, and no auxiliary sums."""
    losses = cross_entropy(model, batch)
    return losses.sum(), losses.size, {}


def linen_loss_fn(params, batch, keys):
    """Return the same for linen, with parameters instead of a model."""
    return loss_fn(lambda x: net.apply(params, x), batch, keys)


def train(name, state, pure_loss_fn):
    """Train to the end of the plan, store the curve and return the state."""
    step, losses, began = (
        rampup.train_step(pure_loss_fn, tx, plan, mesh),
        [],
        time.perf_counter(),
    )
    for batch in rampup.step_batches(rows, plan, mesh):
        state, metrics = step(state, batch)
        losses.append(
            (
                batch.position.consumed_samples
                + batch.position.split.global_batch_size,
                metrics["loss"],
            )
        )
    curves[name] = [(samples, float(loss)) for samples, loss in losses]
    seconds = time.perf_counter() - began
    print(
        f"{name}: loss {curves[name][-1][1]:.3f}, {seconds:.1f} s, programs compiled:"
        f" {step.num_compilations}"
    )
    return state


tx = optax.adam(0.005)
train(
    "train_step, linen",
    rampup.prepare_state(
        TrainState.create(apply_fn=net.apply, params=params, tx=tx), mesh
    ),
    linen_loss_fn,
)
model = NnxNet(nnx.Rngs(0))
state, pure_loss_fn = rampup.split_model(model, loss_fn, tx, mesh)
rampup.merge_model(model, train("train_step, NNX", state, pure_loss_fn))

# %% [markdown]
# ### Loss against samples
#
# If the batch grows, steps become more expensive, so compare runs by samples. The three linen runs start from the
# same weights and see the same rows, so their curves coincide.


# %%
# @title Loss, and the batch below it
def show(curves, looks, mark=None):
    """Plot curves of (samples, loss) above the batch size."""
    _, (above, below) = plt.subplots(
        2, 1, figsize=(9, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    for (name, curve), (color, line, width) in zip(curves.items(), looks, strict=True):
        above.plot(
            *zip(*curve, strict=True),
            color=color,
            linestyle=line,
            linewidth=width,
            label=name,
        )
    above.set(ylabel="loss", ylim=(0, None))
    above.legend(frameon=False)
    sizes = [
        plan.position(step).split.global_batch_size for step in range(plan.total_steps)
    ]
    below.stairs(sizes, np.cumsum([0, *sizes]), baseline=None, color="C0", linewidth=2)
    below.set(
        xlabel="samples consumed",
        ylabel="samples\nper step",
        xlim=(0, sum(sizes)),
        ylim=(0, 1.15 * max(sizes)),
    )
    if mark is not None:
        above.axvline(mark, color="0.5", linestyle=":")
        above.annotate(
            " stopped, resumed", (mark, above.get_ylim()[1]), va="top", color="0.3"
        )
    plt.show()


show(
    curves,
    (
        ("C0", "-", 5),
        ("C1", "--", 3),
        ("C2", "-", 4),
        ("k", ":", 1.5),
        ("C3", "--", 1.5),
    ),
)

# %% [markdown]
# ## Stop and resume
#
# `Loop` adds checkpoints, a metrics file and a clean stop: when a scheduler ends the job (SIGTERM), the run finishes its
# step and writes a checkpoint. The stop button ends it at once. Where it resumes follows from the plan and the step
# number. Here one run is not interrupted. Another is stopped in the middle of the ramp and started again.

# %%
import json
import signal
import tempfile
from pathlib import Path

from rampup.loop.events import StepDone

folder = Path(tempfile.mkdtemp())
STOP_AFTER_STEP = 40  # @param {type:"integer"}


def run(name, stop_after=None):
    """Train in the folder of this name, from its newest checkpoint if there is one."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == stop_after:
            signal.raise_signal(signal.SIGTERM)

    state, pure_loss_fn = rampup.split_model(NnxNet(nnx.Rngs(0)), loss_fn, tx, mesh)
    step = rampup.train_step(pure_loss_fn, tx, plan, mesh)
    (folder / name).mkdir(exist_ok=True)
    _, summary = rampup.Loop(
        plan=plan,
        step=step,
        batches=lambda start: rampup.step_batches(
            rows, plan, mesh, start=start, seed=0
        ),
        folder=folder / name,
        metrics=rampup.MetricOptions(
            learning_rate=lambda step: 0.005, tokens_per_sample=1, on_event=on_event
        ),
        checkpoints=rampup.CheckpointOptions(
            checkpoint_period=STEPS, identity={"data": "spirals"}
        ),
    ).run(state)
    print(
        f"{name}: steps {summary.resumed_from} to {summary.steps}, loss"
        f" {summary.final_loss:.4f}"
    )
    return summary


def lines(name):
    """Return the metrics of a run, one line per step."""
    return [
        json.loads(line)
        for line in (folder / name / "metrics.jsonl").read_text().splitlines()
    ]


run("uninterrupted")
first_part = run("stopped", stop_after=STOP_AFTER_STEP)
run("stopped")
runs = {
    name: [(line["consumed_samples"], line["loss"]) for line in lines(name)]
    for name in ("uninterrupted", "stopped")
}
print(
    f"{len(runs['stopped'])} steps, losses equal bit for bit:"
    f" {runs['uninterrupted'] == runs['stopped']}"
)

# %%
stopped_at = plan.ramp.samples_before(first_part.steps)
show(runs, (("C1", "-", 4), ("k", "--", 1.3)), mark=stopped_at)

# %% [markdown]
# `rampup plot FOLDER ... -o runs.png` and `draw_runs` plot the folders of one or several runs.
#
# Next: `pipeline` runs the same ramp through pipeline stages. `batch_sizes_explained` reads the batch sizes of other
# systems.
