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
# # Reinforcement learning: a verifiable reward
#
# This notebook trains two policies with GRPO. The first is a Flax model of your own with a reward that is
# any Python function, on one device. The second is a small language model that learns to add numbers, on all devices.
# In both, generation, log-probabilities and updates are one compiled program each.
#
# On a CPU it takes about two minutes; it has not been run on a TPU or a GPU yet.

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
import json
import tempfile
from pathlib import Path

import jax
import optax
from flax import nnx
from matplotlib import pyplot as plt

from rampup.contrib.rl import (
    RolloutConfig,
    RolloutOptions,
    RolloutPlan,
    Size,
    Training,
    build_rollout_plan,
    rollout_step,
    split_policy,
)
from rampup.contrib.rl.train import train
from rampup import make_mesh

print(
    f"found {jax.device_count()} device(s): {jax.devices()[0].device_kind}; JAX"
    f" {jax.__version__}"
)
mesh = make_mesh(devices=jax.devices()[:1])

# %% [markdown]
# ## Your own model and reward
#
# A step generates 8 responses to each of 16 prompts and trains on them in two mini batches, twice. The reward likes
# even numbers. It is an ordinary function of lists.


# %%
class Bigram(nnx.Module):
    """Predicts a token from the one before it."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.out = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        """Return the logits of every next token."""
        return self.out(nnx.gelu(self.embed(tokens)))


def reward(prompts, responses):
    """Return one number per response."""
    return [
        sum(token % 2 == 0 for token in response) / len(response)
        for response in responses
    ]


plan = RolloutPlan(
    rollout_batch=Size(count=16, unit="prompts"),
    samples_per_prompt=8,
    policy=Training(
        mini_batch=Size(count=8, unit="prompts"),
        microbatch=Size(count=4, unit="prompts"),
        num_epochs=2,
    ),
    num_steps=40,
)
policy, params = split_policy(Bigram(nnx.Rngs(0)))
options = RolloutOptions(max_prompt_length=1, max_response_length=8)
step = rollout_step(
    policy, optax.adam(0.01), plan, mesh, reward=reward, options=options
)
state, rewards = step.create_state(params), []
for _ in range(plan.num_steps):
    state, metrics = step(state, [[token] for token in range(1, 17)])
    rewards.append(metrics["reward"])
print(
    f"reward {rewards[0]:.2f} -> {rewards[-1]:.2f}; learned:"
    f" {rewards[-1] > rewards[0] + 0.2}"
)
print("programs compiled:", step.compilations)

# %%
plt.figure(figsize=(6, 3))
plt.plot(rewards)
plt.xlabel("step")
plt.ylabel("mean reward")
plt.show()

# %% [markdown]
# ## Arithmetic
#
# `rampup train configs/rl.yml` runs this from the command line. The warm start imitates answers; half of them are right.
# The reward, 1 for a right answer, then teaches the policy more than the answers did. The run has a folder with
# checkpoints and metrics, and resumes exactly.

# %%
config = RolloutConfig(
    base_output_directory=tempfile.mkdtemp(),
    run_name="arithmetic",
    mini_batch_size=16,
    train_micro_batch_size=8,
    num_batches=40,
    max_operand=29,
    num_test_batches=3,
    warm_start_steps=700,
    measure_gradient_noise=True,
    ici_data_parallelism=1,
    ici_fsdp_parallelism=-1,
)
summary = train(config)
print(f"right answers {summary.accuracy_before:.0%} -> {summary.accuracy_after:.0%}")
print("better than before:", summary.accuracy_after > summary.accuracy_before)
print("programs compiled:", summary.num_compilations)

# %%
lines = [json.loads(line) for line in Path(summary.metrics).read_text().splitlines()]
for key, label in {
    "reward": "mean reward",
    "zero_spread_share": "share of groups that teach nothing",
}.items():
    plt.figure(figsize=(6, 3))
    plt.plot([line["rollout"] for line in lines], [line[key] for line in lines])
    plt.xlabel("step")
    plt.ylabel(label)
    plt.show()

# %% [markdown]
# ## What does my GRPO step learn from?
#
# Four questions to ask of any step, here answered for the run above. A notebook for
# fine-tuning often has 2 responses to a prompt. A group whose rewards are all equal has
# no advantage and teaches nothing: with a success rate p that is a share of
# p^n + (1 - p)^n of the groups of n responses.

# %%
plan = build_rollout_plan(config, jax.device_count())
print(f"chips used: {plan.policy_updates.data_parallel_size} of {jax.device_count()}")
print(f"prompts per update: {lines[-1]['num_prompts']}")
print("share of groups that teach nothing, by formula:")
print("  success rate   n = 2   n = 4   n = 8   n = 16")
for p in (0.1, 0.3, 0.5):
    shares = [f"{p**n + (1 - p) ** n:8.0%}" for n in (2, 4, 8, 16)]
    print(f"  {p:12}", *shares, sep="")
own = config.num_generations
measured = sum(line["zero_spread_share"] for line in lines) / len(lines)
print(f"measured in this run, n = {own}: {measured:.0%}")
last = lines[-1]
between, within = last["noise_between_prompts"], last["noise_within_prompts"]
print(f"noise between prompts {between}, within a prompt's responses {within}")
print(f"noise scale: {last['noise_scale_prompts']} prompts")

# %% [markdown]
# If most groups teach nothing, sample more responses or other prompts: the batch is
# smaller than it looks. If the noise is between prompts, more responses do not help;
# take more prompts. `rampup check` prints the first three lines for a file of Tunix,
# veRL, SkyRL or trlX.
#
# **So:** a model and a reward are all that a run needs. Watch the share of groups that teach nothing. If it is large,
# sample more responses, or other prompts.
