"""Tests of rampup.contrib.tunix: Tunix's own trainer with a ramp. They need the
package google-tunix.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers.snippets import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("tunix.sft.peft_trainer")

PROGRAM = """
import json, logging, os, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint as ocp
from flax import nnx
from tunix.sft import hooks, peft_trainer
import rampup
from rampup.contrib.tunix import num_microbatches, prepare

out, folder, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
compiled = []
class Count(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("Finished XLA compilation of jit(_train_step)"):
            compiled.append(1)
jax.config.update("jax_log_compiles", True)
logging.getLogger("jax").addHandler(Count())

plan = rampup.build_plan(rampup.Config(batch_size_schedule="0:8 48:16 112:32", steps=14, microbatch_size=4), 2)
mesh = rampup.make_mesh()

class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(16, 8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)
    def __call__(self, tokens):
        return self.out(self.embed(tokens))

def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

class Losses(hooks.TrainingHooks):
    losses, evals = {}, []
    def on_train_start(self, trainer): pass
    def on_train_end(self, trainer): pass
    def on_train_step_start(self, trainer):
        if trainer.iter_steps == kill_at:
            trainer.checkpoint_manager._checkpoint_manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
    def on_train_step_end(self, trainer, step, loss): self.losses[int(step)] = float(loss)
    def on_eval_step_start(self, trainer): pass
    def on_eval_step_end(self, trainer, loss): self.evals.append(float(loss))

trainer = peft_trainer.PeftTrainer(
    Net(nnx.Rngs(0)),
    rampup.multi_steps(optax.adam(1e-2), plan),
    peft_trainer.TrainingConfig(
        eval_every_n_steps=10, max_steps=num_microbatches(plan), data_sharding_axis=("data",), checkpoint_root_directory=folder,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=4, max_to_keep=2),
    ),
)
trainer = trainer.with_loss_fn(loss_fn).with_gen_model_input_fn(lambda x: x)
trainer.with_training_hooks(Losses())
rows = [{"tokens": ((row + np.arange(9) * (1 + row % 3)) % 16).astype(np.int32)} for row in range(600)]
held_out = [{"tokens": np.stack([row["tokens"] for row in rows[-8:]])}]
first = trainer.iter_steps
prepare(trainer, rows, plan, mesh, seed=3, eval_batches=held_out)
with mesh:
    trainer.train((), eval_ds=held_out)
weights = [np.asarray(x).tolist() for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(trainer.model)))]
state = trainer.optimizer.opt_state
json.dump({"first": first, "losses": Losses.losses, "evals": Losses.evals, "weights": weights, "compiled": len(compiled),
    "steps": int(state.gradient_step[...]), "microbatches": trainer.iter_steps}, open(out, "w"))
"""


def run(command, devices):
    """Run Python in a process of its own."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def train(tmp_path, name, folder, kill_at=-1):
    """Run the program in a process of its own, and return what it wrote, or None if it
    was killed.
    """
    out = tmp_path / name
    command = ["-c", PROGRAM, str(out), str(tmp_path / folder), str(kill_at)]
    done = run(command, devices=2)
    assert done.returncode == (0 if kill_at < 0 else -signal.SIGKILL), done.stderr[
        -3000:
    ]
    return json.loads(out.read_text()) if kill_at < 0 else None


def test_a_ramp_is_one_executable_and_resumes_bit_for_bit(tmp_path):
    """Three batch sizes; killed in the middle of an accumulation and resumed, with the
    same losses, evaluations and weights.
    """
    whole = train(tmp_path, "whole.json", "one")
    # 6 steps of 1 microbatch, 4 of 2 and 4 of 4; 2 devices with 4 rows each.
    assert (whole["steps"], whole["microbatches"], whole["compiled"]) == (
        14,
        6 + 8 + 16,
        1,
    )
    assert len(whole["losses"]) == 30
    assert whole["losses"]["30"] < whole["losses"]["1"]
    train(tmp_path, "killed.json", "two", kill_at=18)
    resumed = train(tmp_path, "resumed.json", "two")
    assert (resumed["first"], resumed["compiled"]) == (
        16,
        1,
    )  # microbatch 2 of 4 of step 10
    assert len(resumed["losses"]) == 14
    assert resumed["losses"] == {
        step: loss for step, loss in whole["losses"].items() if int(step) > 16
    }
    assert resumed["evals"][1:] == whole["evals"][2:]
    assert resumed["weights"] == whole["weights"]


def test_the_example_of_the_guide_runs_and_resumes(tmp_path):
    """The file trains 60 steps; started again with its folder, it has nothing left to
    do.
    """
    for _ in range(2):
        done = run(
            [str(ROOT / "docs" / "examples" / "tunix_ramp.py"), str(tmp_path)],
            devices=1,
        )
        assert done.stdout.splitlines()[-1] == "280 microbatches, 60 optimizer steps"


def test_what_would_train_otherwise_than_the_plan_is_refused():
    """Accumulation by Tunix, `max_steps` in optimizer steps, another optimizer, and the
    plan of another run.
    """
    import jax
    import optax
    from flax import nnx
    from tunix.sft import peft_trainer

    import rampup
    from rampup.contrib.tunix import locate, num_microbatches, prepare
    from rampup.errors import ConfigError, ResumeMismatchError

    def plan_of(schedule):
        return rampup.build_plan(
            rampup.Config(batch_size_schedule=schedule, steps=14, microbatch_size=4), 1
        )

    def trainer(tx, **config):
        options = peft_trainer.TrainingConfig(eval_every_n_steps=99, **config)
        return peft_trainer.PeftTrainer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tx, options)

    plan, mesh, tx = (
        plan_of("0:4 24:8"),
        rampup.make_mesh(devices=jax.devices()[:1]),
        optax.sgd(0.1),
    )
    assert [locate(plan, number) for number in (0, 5, 6, 7, 21)] == [
        (0, 0),
        (5, 0),
        (6, 0),
        (6, 1),
        (13, 1),
    ]
    assert num_microbatches(plan) == 22
    mine = rampup.multi_steps(tx, plan)
    for words, made in [
        ("would accumulate twice", trainer(mine, gradient_accumulation_steps=2)),
        ("must count microbatches: 22 for the 14 steps", trainer(mine, max_steps=14)),
        ("must be rampup.multi_steps", trainer(tx)),
        ("of the same plan", trainer(rampup.multi_steps(tx, plan_of("0:4 20:8")))),
    ]:
        with pytest.raises(ConfigError, match=words):
            prepare(made, [], plan, mesh)
    resumed = trainer(mine)
    resumed._iter_steps = 7
    with pytest.raises(
        ResumeMismatchError, match="but this plan is at step 6, microbatch 1;"
    ):
        prepare(resumed, [], plan, mesh)
