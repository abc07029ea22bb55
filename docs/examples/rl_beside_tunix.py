"""Time a step of GRPO beside Tunix, on a model and a task of the same sizes: `python
docs/examples/rl_beside_tunix.py [STEPS]`.

Needs google-tunix and jax. Both systems train in one process and take turns step by
step, so that both see the same load. A step generates responses to 32 prompts, 8 each,
rewards them, and runs two optimizer steps of two passes each.
"""

import os
import statistics
import sys
import threading
import time

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from rampup import make_mesh
from rampup.contrib.rl import (
    Arithmetic,
    RolloutOptions,
    RolloutPlan,
    Size,
    Training,
    rollout_step,
)
from rampup.contrib.rl.tasks import END_TOKEN, decode, encode
from rampup.lm.transformer import LanguageModel

PROMPTS, RESPONSES, MINI, MICRO, LENGTHS = 32, 8, 16, 8, (6, 4)
WARM_UP = 2
task = Arithmetic(max_operand=49)


class Bytes:
    """A byte tokenizer as Tunix takes it. Token 0 pads."""

    def encode(self, text, **_):
        """Return the tokens of a text."""
        return encode(text)

    def decode(self, ids, **_):
        """Return the text of tokens."""
        return decode([int(token) for token in ids if token])

    def bos_id(self):
        """Return the token before a prompt."""
        return 1

    def eos_id(self):
        """Return the token that ends a response."""
        return END_TOKEN

    def pad_id(self):
        """Return the token that pads."""
        return 0


def rampup_steps(steps):
    """Yield the seconds of each step, and of its generation with rewards and
    log-probabilities.
    """

    def size(count):
        return Size(count=count, unit="prompts")

    plan = RolloutPlan(
        rollout_batch=size(PROMPTS),
        samples_per_prompt=RESPONSES,
        policy=Training(mini_batch=size(MINI), microbatch=size(MICRO)),
        generation=size(MICRO),
        num_steps=steps,
    )
    model = LanguageModel(
        num_layers=2, width=64, mlp_dim=256, num_heads=4, num_kv_heads=4, vocab_size=256
    )
    options = RolloutOptions(
        max_prompt_length=LENGTHS[0],
        max_response_length=LENGTHS[1],
        end_token=END_TOKEN,
        beta=0.01,
        decode=decode,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    step = rollout_step(
        model, optax.adamw(1e-3), plan, mesh, reward=task.reward, options=options
    )
    state = step.create_state(model.init(jax.random.key(0)))
    collect, generation = step._collect, [0.0]

    def timed(*args):
        began = time.perf_counter()
        found = collect(*args)
        generation[0] = time.perf_counter() - began
        return found

    step._collect = timed
    for number in range(steps):
        prompts = [
            encode(prompt)
            for prompt in task.prompts(number * PROMPTS, (number + 1) * PROMPTS)
        ]
        began = time.perf_counter()
        state, _ = step(state, prompts)
        jax.block_until_ready(state.params)
        yield time.perf_counter() - began, generation[0]
    print("rampup's programs:", step.compilations)


def tunix_steps(steps):
    """Yield the same of Tunix: its learner asks for the next batch when a step is done,
    and waits there for its turn.
    """
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=256,
        num_heads=4,
        head_dim=16,
        num_kv_heads=4,
        rope_theta=10_000,
        norm_eps=1e-6,
    )
    actor, reference = (qwen3.Qwen3(config, rngs=nnx.Rngs(0)) for _ in range(2))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=Bytes(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-3),
                mini_batch_size=MINI,
                train_micro_batch_size=MICRO,
                rollout_micro_batch_size=MICRO,
                compute_logps_micro_batch_size=MICRO,
                max_steps=(steps + 1)
                * PROMPTS
                // MINI,  # it ends with the data, so that the last step is timed
                eval_every_n_steps=10**6,
            ),
            # Without top_p it would sample greedily.
            rollout_config=RolloutConfig(
                max_tokens_to_generate=LENGTHS[1],
                max_prompt_length=8,  # a power of two, to which it pads prompts anyway
                kv_cache_size=16,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    generation, found, go, done = (
        [0.0],
        [],
        threading.Semaphore(0),
        threading.Semaphore(0),
    )

    def reward(prompts, completions, **_):
        return task.reward(prompts, [text.split("\n")[0] for text in completions])

    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=GRPOConfig(
            num_generations=RESPONSES,
            num_iterations=1,
            beta=0.01,
            loss_agg_mode="token-mean",
        ),
    )
    sample = learner._generate_and_compute_advantage

    def timed(*args, **options):
        began = time.perf_counter()
        example = jax.block_until_ready(sample(*args, **options))
        generation[0] += time.perf_counter() - began
        return example

    learner._generate_and_compute_advantage = timed

    def batches():
        for number in range(steps):
            go.acquire()
            generation[0], began = 0.0, time.perf_counter()
            yield {"prompts": task.prompts(number * PROMPTS, (number + 1) * PROMPTS)}
            jax.block_until_ready(nnx.state(cluster.actor_trainer.model))
            found.append((time.perf_counter() - began, generation[0]))
            done.release()

    thread = threading.Thread(target=lambda: learner.train(batches()), daemon=True)
    thread.start()
    for _ in range(steps):
        go.release()
        while not done.acquire(timeout=1):
            if not thread.is_alive():
                raise RuntimeError("Tunix ended early")
        yield found[-1]


def main():
    """Print medians and quartiles, in milliseconds."""
    steps = (int(sys.argv[1]) if len(sys.argv) > 1 else 30) + WARM_UP
    pairs = list(zip(rampup_steps(steps), tunix_steps(steps), strict=True))[WARM_UP:]
    print(
        f"{len(pairs)} steps in turn, load {os.getloadavg()[0]:.1f} on {os.cpu_count()}"
        " cores; median (quartiles), ms"
    )
    rows = {
        "step": lambda seconds, generation: seconds,
        "generation, rewards, log-probabilities": lambda seconds, generation: (
            generation
        ),
        "the updates": lambda seconds, generation: seconds - generation,
    }
    for name, of in rows.items():
        ours, theirs = ([1e3 * of(*pair[side]) for pair in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        cells = [
            f"{q[1]:.3g} ({q[0]:.3g} to {q[2]:.3g})"
            for q in (statistics.quantiles(x, n=4) for x in (ours, theirs, ratios))
        ]
        print(f"{name}: rampup {cells[0]}, Tunix {cells[1]}, ratio {cells[2]}")


if __name__ == "__main__":
    main()
