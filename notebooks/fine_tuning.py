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
# # How large should my fine-tuning batch be?
#
# Notebooks for fine-tuning have a batch of 1, 2, 4 or 8, and nobody says why. This one
# measures it for low-rank adapters (LoRA), on one chip:
#
# 1. Is the loss a sum over rows, as gradient accumulation needs it?
# 2. What is the largest microbatch that fits?
# 3. Sixty steps measure the noise of the gradient: what do batches of 8, 32 and 128
#    waste?
# 4. Train, lose the connection, and go on where the run was.
#
# On a CPU it takes about three minutes, with a small model that it trains first. It has
# not been run on a TPU or a GPU yet.

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
import json
import signal
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rampup
from rampup.contrib.lab import largest_microbatch
from rampup.loop.events import StepDone

device = jax.devices()[0]
print(f"found {device.platform.upper()}, {device.device_kind}; JAX {jax.__version__}")
mesh = rampup.make_mesh(devices=[device])

# %% [markdown]
# ## A model that was trained before
#
# A byte-level transformer learns to copy, reverse and sort short strings. Every
# projection has an adapter of rank 4, which stays at zero.
#
# With `GEMMA = True`, Gemma 3 with 270 million parameters takes its place. That needs an
# accelerator, `pip install google-tunix`, and a download of 0.6 GB under Gemma's terms. It
# has run here with weights drawn at random in place of the download, on a CPU.

# %%
GEMMA = False  # @param {type:"boolean"}
LENGTH, WIDTH, VOCAB, RANK = 32, 64, 128, 4


class Block(nnx.Module):
    """Causal attention and a two-layer network, each projection with an adapter."""

    def __init__(self, rngs):
        def linear(inputs, outputs):
            return nnx.LoRALinear(inputs, outputs, lora_rank=RANK, rngs=rngs)

        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x):
        """Return the sum of the input and of both parts."""
        parts = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], 4, WIDTH // 4) for part in parts)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Two blocks between an embedding and its transpose."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.place = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.first, self.second = Block(rngs), Block(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of the next tokens."""
        x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
        return self.embed.attend(self.norm(self.second(self.first(x))))


def encode(text):
    """Return the tokens of a text: its bytes."""
    return list(text.encode())


def logits_of(model, tokens):
    """Return the logits of the next tokens, (rows, length, vocabulary)."""
    return model(tokens)


def row_of(question, answer):
    """Return the tokens of a text, and a weight of 1 for those of its answer."""
    asked, told = encode(question), encode(f"{answer}\n")
    row = {"tokens": np.zeros(LENGTH, np.int32), "weight": np.zeros(LENGTH, np.float32)}
    row["tokens"][: len(asked) + len(told)] = asked + told
    row["weight"][len(asked) : len(asked) + len(told)] = 1
    return row


def strings(number, seed):
    """Return rows that copy, reverse or sort a string."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(number):
        letters = random.integers(97, 123, size=random.integers(4, 11))
        text, kind = "".join(map(chr, letters)), "crs"[random.integers(3)]
        answer = {"c": text, "r": text[::-1], "s": "".join(sorted(text))}[kind]
        rows.append(row_of(f"{kind}{text}=", answer))
    return rows


def loss_fn(model, batch, keys):
    """Return the sum of the losses of the answers' tokens, and their number."""
    logits = logits_of(model, batch["tokens"][:, :-1]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["tokens"][:, 1:]
    )
    weight = batch["weight"][:, 1:]
    return jnp.sum(losses * weight), jnp.sum(weight), {}


def plan_of(schedule, steps, microbatch_size):
    """Return the plan of a schedule on one device."""
    config = rampup.Config(
        batch_size_schedule=schedule, steps=steps, microbatch_size=microbatch_size
    )
    return rampup.build_plan(config, num_devices=1)


def gemma_with_adapters():
    """Return Gemma 3, by Tunix, with adapters, by Qwix, and its tokenizer."""
    import qwix
    from tunix.models.gemma3 import model as gemma
    from tunix.models.gemma3 import params as weights

    model = weights.create_model_from_checkpoint(
        weights.GEMMA3_270M_IT, gemma.ModelConfig.gemma3_270m_it()
    )
    where = ".*q_einsum|.*kv_einsum|.*gate_proj|.*down_proj|.*up_proj"
    adapters = qwix.LoraProvider(module_path=where, rank=RANK, alpha=2.0 * RANK)
    model = qwix.apply_lora_to_model(
        model, adapters, rngs=nnx.Rngs(0), **model.get_model_input()
    )
    return model, weights.create_tokenizer()


def gemma_logits(model, tokens):
    """Return what `logits_of` returns; Gemma takes places and a mask as well."""
    rows, length = tokens.shape
    places = jnp.broadcast_to(jnp.arange(length), (rows, length))
    mask = jnp.tril(jnp.ones((length, length), bool))
    mask = jnp.broadcast_to(mask, (rows, length, length))
    logits, _ = model(tokens, places, None, mask)
    return logits


if GEMMA:
    model, tokenizer = gemma_with_adapters()
    encode, logits_of = tokenizer.EncodeAsIds, gemma_logits
else:
    model = Transformer(nnx.Rngs(0))
    PRETRAINING = 500  # steps
    base = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    tx = optax.adam(optax.warmup_cosine_decay_schedule(0, 3e-3, 50, PRETRAINING))
    state, base_loss = rampup.split_model(model, loss_fn, tx, mesh, wrt=base)
    step = rampup.train_step(base_loss, tx, plan_of("0:64", PRETRAINING, 64), mesh)
    for batch in step.batches(strings(64 * PRETRAINING, seed=1)):
        state, metrics = step(state, batch)
    rampup.merge_model(model, state)
    print(f"trained before: loss {float(metrics['loss']):.2f}")

# %% [markdown]
# ## The task, and the adapters
#
# The new task is addition: `123+45=168`. Only the adapters are trained, `wrt` says
# so.


# %%
def sums(number, seed):
    """Return rows that add two numbers."""
    random = np.random.default_rng(seed)
    pairs = random.integers(1000, size=(number, 2)).tolist()
    return [row_of(f"{a}+{b}=", f"{a + b}") for a, b in pairs]


rows, held_out = sums(4096, seed=2), sums(512, seed=3)
RATE = 4e-3
tx = optax.adam(RATE)
state, lora_loss = rampup.split_model(model, loss_fn, tx, mesh, wrt=nnx.LoRAParam)
trained = sum(leaf.size for leaf in jax.tree.leaves(state.params))
print(f"{trained:,} parameters are trained")

# %% [markdown]
# ## 1. Is the loss a sum over rows?

# %%
print(rampup.check_loss(lora_loss, state, rows))

# %% [markdown]
# ## 2. What is the largest microbatch that fits?
#
# `largest_microbatch` compiles the step for growing microbatches and asks for the
# memory. A chip says how much it has. A CPU does not, so here it gets 0.1 GiB.

# %%
memory = 0.1 if device.platform == "cpu" else None
fits = largest_microbatch(
    lora_loss, tx, state, rows[0], mesh, memory_gib=memory, most=1024
)
print(f"{fits.microbatch_size} rows fit, {fits.next_larger} do not")

# %% [markdown]
# ## 3. Sixty steps measure the noise
#
# The noise scale N is the variance of the gradient of one row over the square of the
# gradient. A batch of B rows wastes about B / (N + B) of its rows: so much less would
# have led as far in more, smaller steps. Sixty steps of 8 rows say how large N is.

# %%
MEASURED = 60
step = rampup.train_step(
    lora_loss, tx, plan_of("0:8", MEASURED, 1), mesh, measure_gradient_noise=True
)
noise = rampup.plan.NoiseScale(half_life_samples=8 * MEASURED / 2)
state, _ = rampup.split_model(model, loss_fn, tx, mesh, wrt=nnx.LoRAParam)
for batch in step.batches(rows, seed=0):
    state, metrics = step(state, batch)
    found = jax.device_get(metrics["gradient_noise"])
    noise.update(
        samples=8,
        weight=float(metrics["weight"]),
        trace=float(found["trace"]),
        squared_norm=float(found["squared_norm"]),
    )
scale = noise.in_samples
print(f"noise scale {scale} rows, with its 90% interval")
if scale.value is None:
    raise ValueError("the noise scale is not known yet: raise MEASURED")

# %% [markdown]
# The table has the waste of three batches, and what an epoch costs in steps and
# minutes: each batch runs for a few steps in microbatches of at most 32 rows.


# %%
def seconds_per_step(size):
    """Return the seconds of a step with a batch, the median of five."""
    step = rampup.train_step(
        lora_loss, tx, plan_of(f"0:{size}", 8, min(size, 32)), mesh, check_loss=False
    )
    state, _ = rampup.split_model(model, loss_fn, tx, mesh, wrt=nnx.LoRAParam)
    seconds = []
    for batch in step.batches(rows):
        begun = time.perf_counter()
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds[3:]))


def wasted(size, scale):
    """Return the share of its rows that a batch wastes."""
    return size / (scale + size)


print("batch   wasted (90% interval)   steps of an epoch   minutes")
for size in (8, 32, 128):
    middle, most = wasted(size, scale.value), wasted(size, scale.low)
    least = wasted(size, scale.high)
    steps = len(rows) // size
    minutes = steps * seconds_per_step(size) / 60
    interval = f"({least:.0%} to {most:.0%})"
    print(f"{size:5} {middle:8.0%} {interval:>14} {steps:19} {minutes:9.2f}")

# %% [markdown]
# On one chip that is full with 8 rows, a larger batch saves no time: take the one that
# wastes little. On a chip that is faster with 32, weigh the waste against the minutes.
# [One paper](https://arxiv.org/abs/2602.09492) finds that a tuned batch is worth more than
# most variants of LoRA. The guide *Fine-tuning* says how well the noise scale predicted
# the cost of a batch in our sweep.
#
# ## 4. Train, lose the connection, go on
#
# `Loop` writes checkpoints and metrics into a folder; on Colab, make it one of your
# Drive. The run is stopped in its middle, and the same call goes on.

# %%
STEPS = 160
folder = Path(tempfile.mkdtemp()) / "run"
folder.mkdir()
plan = plan_of("0:8 640:16", STEPS, 8)


def run(stop_after=None):
    """Train in the folder, from its newest checkpoint if there is one."""

    def on_event(event):
        if isinstance(event, StepDone) and event.step == stop_after:
            signal.raise_signal(signal.SIGTERM)  # what a machine gets before it goes

    state, pure_loss = rampup.split_model(model, loss_fn, tx, mesh, wrt=nnx.LoRAParam)
    step = rampup.train_step(pure_loss, tx, plan, mesh)
    loop = rampup.Loop(
        plan=plan,
        step=step,
        batches=lambda start: rampup.step_batches(
            rows, plan, mesh, start=start, seed=0
        ),
        folder=folder,
        checkpoints=rampup.CheckpointOptions(
            checkpoint_period=50, identity={"data": "sums"}
        ),
        metrics=rampup.MetricOptions(on_event=on_event),
    )
    state, summary = loop.run(state)
    print(f"steps {summary.resumed_from} to {summary.steps}")
    return state


run(stop_after=70)
state = run()
lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
print("every step once:", [line["step"] for line in lines] == list(range(STEPS)))

# %%
evaluate = rampup.EvalStep(lora_loss, mesh)
sums_of = [evaluate(state, batch) for batch in evaluate.batches(held_out, 64)]
held_out_loss = sum(float(x) for x, _ in sums_of) / sum(float(w) for _, w in sums_of)
print(f"loss {lines[0]['loss']:.2f} -> {lines[-1]['loss']:.2f}, held out", end=" ")
print(f"{held_out_loss:.2f}; learned: {held_out_loss < 0.7 * lines[0]['loss']}")
rampup.merge_model(model, state)  # the model with its trained adapters

# %% [markdown]
# **So:** measure for a minute before you train for hours. Then take the largest batch
# whose waste you would accept if it were twice as large, and no larger one than the chip
# makes faster.
