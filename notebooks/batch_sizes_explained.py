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
# # Batch sizes explained
#
# Four systems for reinforcement learning use the same terms for different things. A *batch size* may count prompts or
# responses, for the whole job or for each process. This notebook writes one run in the terms of each system, shows
# what the files mean, and checks a file of yours. Then it packs sequences of different lengths, and finds sizes for a
# given memory. On a CPU it takes about half a minute; it has not been run on a TPU or a GPU yet.

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
import contextlib
import io
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from matplotlib import pyplot as plt
from IPython.display import HTML, display

import rampup
from rampup.cli import main
from rampup.contrib.rl.packing import packed_rows
from rampup.contrib.rl.plan import Size, Training
from rampup.show.figures import draw_batch

found = jax.devices()
print(
    f"found {len(found)} device(s): {found[0].platform.upper()}, {found[0].device_kind}"
)
print(f"jax {jax.__version__}, rampup {rampup.__version__}")
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## One run, four files
#
# Eight devices, each a replica of the model. A step generates 8 responses to each of 64 prompts (a *sample* is one
# response). An optimizer step trains on 16 prompts, and 4 responses per replica fit into memory at once.

# %%
(folder / "skyrl.yml").write_text("""
trainer:
  train_batch_size: 64
  policy_mini_batch_size: 16
  micro_train_batch_size_per_gpu: 4
  placement: {policy_num_gpus_per_node: 8}
generator: {n_samples_per_prompt: 8}
""")
(folder / "verl.yml").write_text("""
data: {train_batch_size: 64}
actor_rollout_ref:
  rollout: {n: 8, log_prob_micro_batch_size_per_gpu: 4}
  actor: {ppo_mini_batch_size: 16, ppo_micro_batch_size_per_gpu: 4}
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 8, nnodes: 1}
""")
(folder / "trlx.yml").write_text("""
train: {batch_size: 16, minibatch_size: 4, epochs: 100, total_steps: 10000}
method: {num_rollouts: 64, chunk_size: 64, ppo_epochs: 1}
""")
(folder / "maxtext_rl.yml").write_text("""
batch_size: 16
num_batches: 100
train_micro_batch_size: 4
rollout_micro_batch_size: 16
rl: {num_generations: 8, num_iterations: 1}
""")
# Not in the files: trlX gets the number of processes from its launcher.
stated = {
    "trlx": ["num_processes=8", "num_prompts=6400"],
    "maxtext_rl": ["num_prompts=1600"],
}
verdicts = {
    system: rampup.contrib.check.check_file(
        folder / f"{system}.yml", system, stated.get(system, [])
    )
    for system in ("skyrl", "verl", "trlx", "maxtext_rl")
}

# %% [markdown]
# Their terms side by side. The same number means different things, and different numbers mean the same. MaxText's
# `batch_size` is both the number of prompts generated and the number in an optimizer step. Four optimizer steps on
# one generation cannot be expressed, so its file generates a quarter of the prompts, four times as often.

# %%
SYSTEMS = ("", "SkyRL", "veRL", "trlX", "MaxText RL")


def show_table(*rows):
    """Show rows of text; the first row is the heading."""
    head, *body = (
        "".join(f"<td style='text-align:left'>{cell}</td>" for cell in row)
        for row in rows
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    display(
        HTML(
            "<table><thead><tr"
            f" style='font-weight:bold'>{head}</tr></thead><tbody>{lines}</tbody></table>"
        )
    )


show_table(
    SYSTEMS,
    (
        "generated per step",
        "<b>train_batch_size: 64</b><br>prompts",
        "<b>train_batch_size: 64</b><br>prompts",
        "<b>num_rollouts: 64</b><br>responses per process",
        "<b>batch_size: 16</b><br>prompts",
    ),
    (
        "responses per prompt",
        "<b>n_samples_per_prompt: 8</b>",
        "<b>rollout.n: 8</b>",
        "1 (prompts are repeated)",
        "<b>num_generations: 8</b>",
    ),
    (
        "one optimizer step",
        "<b>policy_mini_batch_size: 16</b><br>prompts",
        "<b>ppo_mini_batch_size: 16</b><br>prompts",
        "<b>batch_size: 16</b><br>responses per process",
        "<b>batch_size: 16</b><br>prompts",
    ),
    (
        "one pass",
        "<b>micro_train_batch_size_per_gpu: 4</b><br>responses per replica",
        "<b>ppo_micro_batch_size_per_gpu: 4</b><br>responses per replica",
        "<b>minibatch_size: 4</b><br>responses per process",
        "<b>train_micro_batch_size: 4</b><br>prompts of the whole job",
    ),
)

# %% [markdown]
# The sizes that follow, computed by the check from the four files:

# %%
FACTS = {
    "samples_per_step": "samples generated per step",
    "mini_batch_samples": "samples per optimizer step",
    "optimizer_steps": "optimizer steps per step",
    "accumulation_steps": "passes per optimizer step",
}
show_table(
    SYSTEMS,
    *(
        (meaning, *(f"{verdict.derived[name]:,}" for verdict in verdicts.values()))
        for name, meaning in FACTS.items()
    ),
    ("what the run does", *(verdict.run for verdict in verdicts.values())),
)

# %% [markdown]
# A verdict shows what each line of a file means.

# %%
verdicts["trlx"]

# %% [markdown]
# ## Check your own file
#
# Name a file on this machine (in Colab, upload it on the left). Without one, the cell uses a broken example: SkyRL's
# own check accepts 2 prompts with 4 responses on 6 devices, and the run then fails at its first step.

# %%
# @title Your file
FILE = ""  # @param {type:"string"}
SYSTEM = (  # @param ["skyrl", "verl", "trlx", "maxtext_rl", "maxtext", "megatron"]
    "skyrl"
)
SETTINGS = ""  # @param {type:"string"}

if not FILE:
    (folder / "yours.yml").write_text("""
trainer:
  train_batch_size: 2
  policy_mini_batch_size: 2
  micro_train_batch_size_per_gpu: 1
  placement: {policy_num_gpus_per_node: 6}
generator: {n_samples_per_prompt: 4}
""")
yours = rampup.contrib.check.check_file(
    FILE or folder / "yours.yml", SYSTEM, SETTINGS.split()
)
yours

# %% [markdown]
# ## Pre-training: a growing batch in two dialects
#
# MaxText counts samples per device and starts to count from zero in each phase. Megatron-LM counts over the whole
# run. With the same sizes the two make different ramps.

# %%
(folder / "maxtext.yml").write_text("""
enable_rampup_batch_size: true
per_device_batch_size_start: 4
per_device_batch_size_increment: 2
per_device_batch_size: 12
global_rampup_samples: 500
steps: 60
""")
(folder / "megatron.yml").write_text("""
rampup_batch_size: [16, 8, 500]
global_batch_size: 48
micro_batch_size: 2
train_samples: 3000
""")
ramps = {
    "MaxText": rampup.contrib.check.check_file(
        folder / "maxtext.yml", "maxtext", ["num_devices=4"]
    ),
    "Megatron-LM": rampup.contrib.check.check_file(
        folder / "megatron.yml", "megatron", ["data_parallel_size=4"]
    ),
}
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
for (name, verdict), (color, line) in zip(
    ramps.items(), (("C0", "-"), ("C1", "--")), strict=True
):
    starts = [phase["start_sample"] for phase in verdict.phases]
    sizes = [phase["global_batch_size"] for phase in verdict.phases]
    axis.stairs(
        sizes,
        [*starts, 700],
        baseline=None,
        color=color,
        linestyle=line,
        linewidth=2,
        label=name,
    )
axis.set(
    xlabel="samples consumed", ylabel="samples per step", xlim=(0, 700), ylim=(0, 55)
)
axis.legend(frameon=False)
plt.show()

# %%
same_run = rampup.Config(**ramps["MaxText"].conversion.values)
draw_batch(rampup.build_plan(same_run))

# %% [markdown]
# ## The same arithmetic as a plan
#
# In a `RolloutPlan` each size has a unit and a scope. A size that does not divide is an error that names the nearest
# sizes that do.

# %%
plan = rampup.contrib.rl.RolloutPlan(
    rollout_batch=Size(count=64, unit="prompts"),
    samples_per_prompt=8,
    policy=Training(
        mini_batch=Size(count=16, unit="prompts"),
        microbatch=Size(count=4, unit="samples", scope="replica"),
        data_parallel_size=8,
        num_epochs=2,
    ),
    generation=Size(count=16, unit="prompts"),
    num_steps=100,
)
plan

# %%
try:
    rampup.contrib.rl.RolloutPlan(
        rollout_batch=Size(count=64, unit="prompts"),
        samples_per_prompt=8,
        policy=Training(
            mini_batch=Size(count=24, unit="prompts", key="mini_batch"),
            data_parallel_size=8,
        ),
    )
except rampup.RampupError as error:
    print(error)

# %% [markdown]
# ## Pack sequences
#
# Responses differ in length. If each is padded to the longest, most of the work is padding. `packed_rows` fills microbatches
# up to a token budget, with Grain. They have one shape, and every replica gets the same number. A smaller budget pads
# the last ones less.

# %%
# @title Lengths, budget and replicas
SEQUENCES = 110  # @param {type:"integer"}
TOKEN_BUDGET = 4096  # @param {type:"integer"}
REPLICAS = 4  # @param {type:"integer"}

lengths = np.clip(
    np.random.default_rng(0).lognormal(6.3, 0.8, SEQUENCES), 32, TOKEN_BUDGET
).astype(int)
tokens = np.ones((SEQUENCES, TOKEN_BUDGET), np.int32)
packed = packed_rows(
    {"tokens": tokens}, lengths, token_budget=TOKEN_BUDGET, num_replicas=REPLICAS
)
padded = 1 - lengths.sum() / (lengths.max() * len(lengths))
padding = 1 - lengths.sum() / packed["tokens"].size
print(f"padded to the longest: {padded:.0%} padding; packed: {padding:.1%}")

# %%
# @title The microbatches and their sequences
figure, axes = plt.subplots(
    1, REPLICAS, figsize=(10, 3.2), sharey=True, layout="constrained", squeeze=False
)
shades = ["#14375e", "#a9c4e4", "#5b7fb5", "#cfe0f3"]
for replica, axis in enumerate(axes[0]):
    for place, segments in enumerate(packed["segments"][:, replica]):
        left = 0
        for number, length in enumerate(np.bincount(segments)[1:]):
            axis.barh(
                place,
                length,
                left=left,
                color=shades[number % 4],
                edgecolor="white",
                linewidth=0.5,
            )
            left += length
        axis.barh(
            place,
            TOKEN_BUDGET - left,
            left=left,
            color="white",
            edgecolor="black",
            hatch="////",
            linewidth=0.5,
        )
    axis.set(
        xlabel="tokens",
        xlim=(0, TOKEN_BUDGET),
        xticks=[0, TOKEN_BUDGET // 2, TOKEN_BUDGET],
    )
    axis.set_title(f"replica {replica}", fontsize=10)
num_microbatches = len(packed["segments"])
axes[0][0].set(ylabel="microbatch", ylim=(num_microbatches - 0.4, -0.6))
axes[0][0].set_yticks(range(num_microbatches))
figure.suptitle(
    "microbatches and their sequences; padding is hatched",
    x=0.01,
    ha="left",
    fontsize=10,
)
plt.show()

# %% [markdown]
# ## Sizes for your memory
#
# `rampup tune` compiles the training step of a configuration for several microbatch sizes, reads the memory of each
# compiled program, and times the largest that fits. The search itself never runs out of memory. Here the model is tiny, and
# so is the assumed memory of the device. This is the slowest cell of the notebook.

# %%
# @title The memory of one device, in GiB
DEVICE_GIB = "0.002"  # @param {type:"string"}

(folder / "tiny.yml").write_text("""
steps: 40
enable_rampup_batch_size: true
per_device_batch_size_start: 4
per_device_batch_size_increment: 4
per_device_batch_size: 8
global_rampup_samples: 80
base_emb_dim: 32
base_num_decoder_layers: 1
base_mlp_dim: 64
base_num_query_heads: 2
max_target_length: 64
""")
with contextlib.redirect_stdout(io.StringIO()) as printed:
    main(["tune", str(folder / "tiny.yml"), "--memory-gib", DEVICE_GIB, "--json"])
tuned = json.loads(printed.getvalue())
print("largest microbatch that fits:", tuned["largest_microbatch"])
print("settings with it:", tuned["settings"])
print("bytes of a device that may be used:", tuned["usable_bytes"])
for trial in tuned["candidates"]:
    print("microbatch of", trial["microbatch_size"], "takes", trial["bytes"])

# %% [markdown]
# **So:** say *prompts per update*, *responses per prompt*, and *samples per device and pass*. Check a file before its run.
