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
# # A miniGPT with a growing batch on eight chips
#
# A small GPT in Flax NNX, trained with data and tensor parallelism, as in the tutorials
# of JAX. Its batch grows from 8 to 64 texts. A statement that is there for rampup has
# `# rampup` in its first line.
#
# 1. The step compiles once, beside a step that compiles for each of the four sizes.
# 2. The run stops on a mesh of 4 x 2 devices, and goes on with one of 2 x 4.
#
# On a TPU with eight chips, such as Kaggle's, it takes them. Elsewhere it simulates
# eight devices on the CPU, in about two minutes. It has not been run on a TPU yet.

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
# @title Eight devices
import glob
import json
import signal
import sysconfig
import tempfile
import time
from pathlib import Path

import jax

if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rampup  # rampup
from rampup.loop.events import StepDone  # rampup

found = jax.devices()
print(f"found {len(found)} device(s): {found[0].platform.upper()}")

# %% [markdown]
# ## Text
#
# The bytes of Python's standard library, in rows of 65: the inputs, and what follows.

# %%
LENGTH, VOCAB, WIDTH, STEPS = 64, 128, 64, 120
files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"".join(path.read_bytes() for path in files)
tokens = np.frombuffer(text, np.uint8).astype(np.int32) % VOCAB
rows = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
rows = np.random.default_rng(0).permutation(rows)
print(f"{len(rows):,} rows")

# %% [markdown]
# ## Model
#
# The kernels of the feed-forward networks and the embedding are sharded over the axis
# `tensor`.


# %%
class Block(nnx.Module):
    """Attention to the tokens before, and a feed-forward network."""

    def __init__(self, mesh, rngs):
        def kernel(*axes):
            return nnx.with_partitioning(
                nnx.initializers.xavier_uniform(), NamedSharding(mesh, P(*axes))
            )

        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=4, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(
            WIDTH, 4 * WIDTH, kernel_init=kernel(None, "tensor"), rngs=rngs
        )
        self.down = nnx.Linear(
            4 * WIDTH, WIDTH, kernel_init=kernel("tensor", None), rngs=rngs
        )

    def __call__(self, x):
        """Return the activations of the next layer."""
        x = x + self.attention(self.norm1(x), mask=jnp.tril(jnp.ones((LENGTH, LENGTH))))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class MiniGPT(nnx.Module):
    """Embeddings of tokens and places, two blocks, and logits."""

    def __init__(self, mesh, rngs):
        table = nnx.with_partitioning(
            nnx.initializers.normal(WIDTH**-0.5),
            NamedSharding(mesh, P("tensor", None)),
        )
        self.tokens = nnx.Embed(VOCAB, WIDTH, embedding_init=table, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.first, self.second = Block(mesh, rngs), Block(mesh, rngs)
        self.output = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of every next token."""
        x = self.tokens(tokens) + self.places(jnp.arange(LENGTH))
        return self.output(self.second(self.first(x)))


def losses_of(model, rows):
    """Return the loss of every token."""
    return optax.softmax_cross_entropy_with_integer_labels(
        model(rows[:, :-1]), rows[:, 1:]
    )


# %% [markdown]
# ## Four compilations
#
# A jitted step compiles for each size of its batch. A large model takes minutes for
# each.


# %%
def make_mesh(data, tensor):
    """Return a mesh of all devices."""
    axes = rampup.MeshAxes(data=data, tensor=tensor)  # rampup
    return rampup.make_mesh(axes)  # rampup


tx = optax.adam(3e-3)
mesh = make_mesh(data=4, tensor=2)
model = MiniGPT(mesh, nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
compilations = []


@nnx.jit
def plain_step(model, optimizer, rows):
    """Train on one batch."""
    compilations.append(len(rows))  # runs while JAX traces
    loss, grads = nnx.value_and_grad(lambda model: losses_of(model, rows).mean())(model)
    optimizer.update(model, grads)
    return loss


for size in (8, 16, 32, 64):
    begun = time.perf_counter()
    batch = jax.device_put(rows[:size], NamedSharding(mesh, P("data")))
    plain_step(model, optimizer, batch).block_until_ready()
    print(f"batch {size}: {time.perf_counter() - begun:.1f} s for the first step")
print("plain step compiled for", compilations)

# %% [markdown]
# ## One compilation
#
# The loss becomes a sum and its weight. The plan says how large each batch is and how
# it is cut, and refuses what does not divide.


# %%
def loss_fn(model, rows, keys):  # rampup
    """Return the sum of the losses, and the number of tokens."""
    losses = losses_of(model, rows)
    return losses.sum(), losses.size, {}  # rampup


def plan_on(mesh):
    """Return the plan of the run on a mesh."""
    config = rampup.Config(  # rampup
        batch_size_schedule="0:8 160:16 480:32 1280:64",
        steps=STEPS,
        ici_data_parallelism=mesh.shape["data"],
        ici_tensor_parallelism=mesh.shape["tensor"],
    )
    return rampup.build_plan(config, len(jax.devices()))  # rampup


print(plan_on(mesh))

# %%
folder = Path(tempfile.mkdtemp())


def train(name, mesh, stop_after=None):
    """Train in the folder of this name, from its newest checkpoint if there is one."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == stop_after:
            signal.raise_signal(signal.SIGTERM)  # what a machine gets before it goes

    plan = plan_on(mesh)
    model = MiniGPT(mesh, nnx.Rngs(0))
    state, pure_loss = rampup.split_model(model, loss_fn, tx, mesh)  # rampup
    step = rampup.train_step(pure_loss, tx, plan, mesh)  # rampup
    (folder / name).mkdir(exist_ok=True)
    loop = rampup.Loop(  # rampup
        plan=plan,
        step=step,
        batches=lambda start: rampup.step_batches(
            rows, plan, mesh, start=start, seed=0
        ),
        folder=folder / name,
        checkpoints=rampup.CheckpointOptions(
            checkpoint_period=40, identity={"data": "stdlib"}
        ),
        metrics=rampup.MetricOptions(on_event=on_event),
    )
    state, summary = loop.run(state)  # rampup
    where = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    print(
        f"{name}: steps {summary.resumed_from} to {summary.steps} on {where};", end=" "
    )
    print("programs compiled:", step.num_compilations)


def lines(name):
    """Return the metrics of a run, one line per step."""
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


train("whole", mesh)
losses = [line["loss"] for line in lines("whole")]
print(
    f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; learned: {losses[-1] < losses[0] - 1}"
)

# %% [markdown]
# ## Stop, and go on with another mesh
#
# The batches of the plan do not depend on the mesh, so the same rows come in the same
# steps. The parameters agree up to rounding.

# %%
train("moved", mesh, stop_after=50)
train("moved", make_mesh(data=2, tensor=4))
pairs = [
    (a["loss"], b["loss"]) for a, b in zip(lines("whole"), lines("moved"), strict=True)
]
print("largest difference of a loss:", max(abs(a - b) for a, b in pairs))
print("same run:", all(abs(a - b) < 1e-2 for a, b in pairs))

# %% [markdown]
# **So:** a growing batch costs one compilation, and a run may move to another slice.
