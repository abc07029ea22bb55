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
# # Pipeline stages, microbatches and bubbles
#
# A model that does not fit on one device can be split into *stages* on different devices. A batch passes through them
# in *microbatches*, so that all stages have work. At the start and the end some stages wait: the *bubble*. This
# notebook shows where the bubble comes from, how a growing batch changes it, and how to train a pipelined model.
#
# A pipeline needs several devices. This notebook simulates eight on the CPU of any machine. It takes about a minute.

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
# @title Devices
SIMULATE_EIGHT_CPU_DEVICES = True  # @param {type:"boolean"}
# %matplotlib inline
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot as plt

if SIMULATE_EIGHT_CPU_DEVICES:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

import rampup
from rampup.plan.pipeline import pass_bubble, predicted_time
from rampup.show.figures import draw_batch, draw_timetable

found = jax.devices()
print(
    f"found {len(found)} device(s): {found[0].platform.upper()}, {found[0].device_kind}"
)
print(f"jax {jax.__version__}, rampup {rampup.__version__}")

# %% [markdown]
# ## Three schedules
#
# Four stages, eight microbatches, and a backward pass that takes twice as long as a forward pass. Each row is a
# stage, and each box is an operation on the microbatch of that number. White is idle time.
#
# **gpipe**: all forward passes, then all backward passes. Every stage keeps the activations of all eight
# microbatches.

# %%
tables = {
    "gpipe": rampup.plan.Timetable.build("gpipe", num_stages=4, num_microbatches=8),
    "1f1b": rampup.plan.Timetable.build("1f1b", num_stages=4, num_microbatches=8),
    "interleaved": rampup.plan.Timetable.build(
        "interleaved", num_stages=4, num_microbatches=8, num_repeats=2
    ),
}
draw_timetable(tables["gpipe"], width=11)

# %% [markdown]
# **1f1b**: one forward pass, one backward pass, as soon as a backward pass is possible. The bubble is the same, but a
# stage keeps at most as many microbatches as there are stages.

# %%
draw_timetable(tables["1f1b"], width=11)

# %% [markdown]
# **interleaved**: each stage has two smaller chunks of the model instead of one, so a microbatch passes every stage
# twice. The bubble is half as long. Activations are sent twice as often.

# %%
draw_timetable(tables["interleaved"], width=11)

# %%
print(f"{'':12}{'idle':>8}{'time':>8}   microbatches kept, by stage")
for name, table in tables.items():
    kept = ", ".join(f"{float(number):g}" for number in table.peak_live_microbatches)
    print(
        f"{name:12}{float(table.bubble_fraction):8.1%}{float(table.makespan):8.1f}  "
        f" {kept}"
    )

# %%
# @title Your own schedule
SCHEDULE = "1f1b"  # @param ["gpipe", "1f1b", "interleaved", "circular"]
STAGES = 4  # @param {type:"integer"}
MICROBATCHES = 4  # @param {type:"integer"}
REPEATS = 1  # @param {type:"integer"}
draw_timetable(
    rampup.plan.Timetable.build(
        SCHEDULE, num_stages=STAGES, num_microbatches=MICROBATCHES, num_repeats=REPEATS
    )
)

# %% [markdown]
# ## The bubble of a growing batch
#
# With p stages, m microbatches and v chunks per stage, the bubble is (p - 1) / (v·m + p - 1) of the time. A ramp
# starts with small batches, and small batches have few microbatches, so the bubble is largest at the start. Here the
# microbatch keeps its size, the ramp changes m, and the bubble shrinks from phase to phase.

# %%
# @title The ramp
START = 32  # @param {type:"integer"}
INCREMENT = 32  # @param {type:"integer"}
END = 128  # @param {type:"integer"}
RAMP_SAMPLES = 1920  # @param {type:"integer"}

num_stages = 4 if jax.device_count() % 4 == 0 else 1
axes = rampup.MeshAxes(data=jax.device_count() // num_stages, pipeline=num_stages)
ramp = rampup.BatchRamp.linear(
    start=START, increment=INCREMENT, end=END, samples=RAMP_SAMPLES
)
plan = rampup.RampPlan(
    ramp=ramp,
    splitter=rampup.BatchSplitter(data_parallel_size=axes.data, num_stages=num_stages),
    num_devices=jax.device_count(),
    total_steps=80,
)
plan

# %%
draw_batch(plan)

# %% [markdown]
# ## Train a pipelined model
#
# Three functions describe a model to the pipeline: `first` comes before the layers, `stage` applies some of the
# layers, and `last` comes after them. Here eight small residual layers learn to distinguish two spirals. The number
# of microbatches is an argument of the compiled program, so one program serves the whole ramp.

# %%
rng = np.random.default_rng(0)
angle, side = 2 * np.pi * np.sqrt(rng.random(4096)), rng.integers(0, 2, 4096)
radius = angle / (2 * np.pi) * np.where(side, 1, -1)
points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(
    np.float32
)
rows = [{"x": x, "y": y} for x, y in zip(points, side.astype(np.int32), strict=True)]


def first(params, batch, keys):
    """Return the input of the layers."""
    return jnp.tanh(3 * batch["x"] @ params["in"])


def stage(layers, x, batch, keys, first_layer):
    """Apply some of the layers."""
    return jax.lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer), None), x, layers)[0]


def last(params, x, batch, keys):
    """Return the sum of the losses, its weight, and no auxiliary sums."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["out"], batch["y"]
    )
    return losses.sum(), losses.size, {}


def train(plan, axes):
    """Train on a mesh with these axes and return the loss of each step."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"in": (2, 32), "layers": (8, 32, 32), "out": (32, 2)}
    scales = {"in": 1.0, "layers": 0.1, "out": 0.2}
    params = {
        name: scales[name] * jax.random.normal(key, shapes[name])
        for name, key in zip(shapes, keys, strict=True)
    }
    mesh, tx = rampup.make_mesh(axes), optax.adam(0.005)
    if axes.pipeline > 1:
        loss_fn = rampup.PipelinedLoss(first=first, stage=stage, last=last)
    else:

        def loss_fn(params, batch, keys):
            return last(
                params,
                stage(params["layers"], first(params, batch, keys), batch, keys, 0),
                batch,
                keys,
            )

    state, step = (
        rampup.create_state(params, tx, mesh),
        rampup.train_step(loss_fn, tx, plan, mesh),
    )
    losses = []
    for batch in rampup.step_batches(rows, plan, mesh, seed=0):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    print(
        f"{axes.data} replica(s) of {axes.pipeline} stage(s): loss"
        f" {float(losses[-1]):.4f}, compiled {step.num_compilations}"
    )
    return np.array([float(loss) for loss in losses])


pipelined = train(plan, axes)

# %% [markdown]
# The same model and the same rows without a pipeline: all devices are replicas. A pipeline must not change what the
# model learns.

# %%
flat_plan = rampup.RampPlan(
    ramp=ramp,
    splitter=rampup.BatchSplitter(data_parallel_size=jax.device_count()),
    num_devices=jax.device_count(),
    total_steps=plan.total_steps,
)
flat = train(flat_plan, rampup.MeshAxes(data=jax.device_count()))
print(f"largest difference of a loss: {np.abs(pipelined - flat).max():.1e}")

# %%
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
ends = [plan.ramp.samples_before(step + 1) for step in range(plan.total_steps)]
axis.plot(ends, flat, color="C1", linewidth=4, alpha=0.6, label="without a pipeline")
axis.plot(
    ends,
    pipelined,
    color="k",
    linestyle="--",
    linewidth=1.3,
    label=f"{num_stages} stages",
)
axis.set(xlabel="samples consumed", ylabel="loss", xlim=(0, ends[-1]), ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Choose the number of microbatches
#
# More microbatches make the bubble smaller. Each microbatch is then smaller too, and every tick costs something
# beyond its arithmetic: it reads weights and sends activations. With b samples in a microbatch and an overhead of h
# samples' worth of work, a step takes (m·v + p - 1) · (b/v + h). rampup computes this for every valid split of the
# batch and takes the fastest.

# %%
# @title Samples per replica and step, and the overhead of a tick in samples
SAMPLES = 64  # @param {type:"integer"}
STAGES_TO_CHOOSE_FOR = 4  # @param {type:"integer"}
OVERHEADS = "0.25, 1, 4"  # @param {type:"string"}

figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained")
looks = ["o-", "s--", "^:", "D-.", "v-"]
for text, look in zip(OVERHEADS.split(","), looks, strict=False):
    overhead = Fraction(text.strip())
    times = {
        m: predicted_time(
            m,
            SAMPLES // m,
            num_stages=STAGES_TO_CHOOSE_FOR,
            num_repeats=1,
            overhead=overhead,
        )
        for m in range(STAGES_TO_CHOOSE_FOR, SAMPLES + 1, STAGES_TO_CHOOSE_FOR)
        if SAMPLES % m == 0
    }
    best = min(times, key=times.__getitem__)
    bubble = float(pass_bubble(STAGES_TO_CHOOSE_FOR, best))
    idle = f"m = {best}, b = {SAMPLES // best}, {bubble:.0%} idle"
    microbatches = list(times)
    ratios = [float(time / times[best]) for time in times.values()]
    axis.plot(microbatches, ratios, look, label=f"h = {text.strip()}: {idle}")
axis.set_xscale("log", base=2)
axis.set_xticks(microbatches, [str(m) for m in microbatches])
axis.set(
    xlabel="microbatches m of a step", ylabel="predicted time / fastest", ylim=(0.9, 3)
)
axis.legend(title="fastest m at overhead h", frameon=False)
plt.show()

# %% [markdown]
# The fastest m differs from phase to phase. Without an overhead, a plan takes the smallest m, which is p. With one
# (`tick_overhead`, or `pipeline_tick_overhead` in a configuration), each phase gets its own m. Here each phase needs
# its own compiled program.

# %%
options = {"data_parallel_size": 2, "num_stages": 4, "rampup_microbatch": "per_phase"}
for overhead in (None, Fraction(1, 4)):
    chosen = rampup.RampPlan(
        ramp=rampup.BatchRamp.linear(start=32, increment=32, end=128, samples=1920),
        splitter=rampup.BatchSplitter(tick_overhead=overhead, **options),
        num_devices=8,
        total_steps=80,
    )
    print(f"overhead {overhead}")
    for phase, split in zip(chosen.ramp.phases, chosen.splits, strict=True):
        m, b = split.num_pipeline_microbatches, split.microbatch_size
        print(
            f"  batch {phase.global_batch_size:4}: m = {m:2}, b = {b:2},"
            f" {3 / (m + 3):.0%} idle"
        )

# %% [markdown]
# **So:** a small batch pays for its bubble. Look at the idle share of the first phases before you ramp through a
# pipeline, and let rampup choose the number of microbatches.
