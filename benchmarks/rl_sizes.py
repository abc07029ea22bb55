"""Time the updates of RL steps of varying size beside those of fixed ones: `python
benchmarks/rl_sizes.py [STEPS] [PROMPTS]`.

Both train the model of configs/rl.yml on 16 prompts * 8 responses per step on average,
in passes of PROMPTS prompts: always 16, or any number from 4 to 28. They take turns, so
that both see the same load. Generation is the same program on the same rows for both
and is left out: a step is what is between the samples on the host and the new
parameters. CPU seconds depend less on other processes.
"""

import sys
import time

import jax
import numpy as np
import optax

from rampup import make_mesh
from rampup.contrib.rl import RolloutOptions, RolloutPlan, Size, Training, rollout_step
from rampup.contrib.rl.config import RolloutConfig
from rampup.contrib.rl.experience import Tally
from rampup.lm.transformer import LanguageModel

MEAN, MOST, RESPONSES, LENGTHS = 16, 28, 8, (16, 16)


def make(prompts, micro, groups):
    """Return a step of up to `prompts` prompts with stored samples, in passes of
    `micro` prompts, and its state.
    """
    plan = RolloutPlan(
        rollout_batch=Size(count=prompts, unit="prompts"),
        samples_per_prompt=RESPONSES,
        policy=Training(
            mini_batch=Size(count=prompts, unit="prompts"),
            microbatch=Size(count=micro, unit="prompts"),
        ),
        num_steps=10**6,
    )
    model = LanguageModel.from_config(RolloutConfig(), vocab_size=256)
    options = RolloutOptions(
        max_prompt_length=LENGTHS[0],
        max_response_length=LENGTHS[1],
        zero_spread_groups=groups,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    step = rollout_step(
        model,
        optax.adamw(1e-3),
        plan,
        mesh,
        reward=lambda p, r: [0.0] * len(p),
        options=options,
    )
    state, rng = (
        step.create_state(jax.jit(model.init)(jax.random.key(0))),
        np.random.default_rng(0),
    )
    experience = {name: np.zeros_like(x) for name, x in state.experience.items()}
    experience["tokens"][:] = rng.integers(1, 256, experience["tokens"].shape)
    for name in ("attention_mask", "response_mask"):
        experience[name][:] = True
    experience["advantages"][:] = rng.normal(size=experience["advantages"].shape)
    experience["log_probabilities"][:] = -np.log(256)
    return step, state.replace(experience=experience)


def timed(step, state, groups):
    """Return the state after an update on some prompts, and its seconds by the clock
    and of the CPU.
    """
    jax.block_until_ready(state.params)
    tally, position = Tally(groups=groups), step.schedule.at(int(state.step))
    step._collect = lambda *args: (state.experience, tally)
    began = time.perf_counter(), time.process_time()
    state, _ = step.update(state, position, lambda start, stop: [])
    jax.block_until_ready(state.params)
    return state, (time.perf_counter() - began[0], time.process_time() - began[1])


def main(steps, micro):
    """Print the seconds per sample of both, and their quotient."""
    sizes = (
        np.random.default_rng(0)
        .integers(2 * MEAN - MOST, MOST + 1, steps // 2)
        .tolist()
    )
    sizes += [2 * MEAN - size for size in sizes]  # the mean is exact
    runs = {
        "fixed": [*make(MEAN, micro, "keep")],
        "varying": [*make(MOST, micro, "drop")],
    }
    seconds = {"fixed": [], "varying": []}
    for number, size in enumerate([MEAN, MEAN, *sizes]):
        for name, groups in (("fixed", MEAN), ("varying", size))[
            :: 1 if number % 2 else -1
        ]:
            step, state = runs[name]
            runs[name][1], took = timed(step, state, groups)
            seconds[name].append(took)
    # The first two compile.
    totals = {
        name: np.sum(took[2:], axis=0) / (sum(sizes) * RESPONSES)
        for name, took in seconds.items()
    }
    for number, clock in enumerate(("the clock", "the CPU")):
        fixed, varying = (1e3 * totals[name][number] for name in ("fixed", "varying"))
        print(
            f"ms per sample by {clock}: fixed {fixed:.4f}, varying {varying:.4f},"
            f" quotient {varying / fixed:.3f}"
        )
    print(
        "rows computed per sample:"
        f" {sum(-(-size // micro) * micro for size in sizes) / sum(sizes):.3f}"
    )
    print(
        "programs", {name: run[0].compilations["update"] for name, run in runs.items()}
    )


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*given, *(100, 1)[len(given) :])
