"""Train on the workers of a Ray cluster, also while workers come and go.

    python launch/ray_train.py configs/base.yml run_name=demo
    base_output_directory=/shared/runs --workers 1 4 --device gpu

The settings are those of `rampup train`. All nodes must see the folder. If a worker
dies, or the cluster grows or shrinks, Ray starts the workers again, and the run
resumes. With one number after --workers, Ray waits until there are as many.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import threading

import ray.train
from ray.train import (
    Checkpoint,
    CheckpointUploadMode,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
)
from ray.train.v2.jax import JaxConfig, JaxTrainer

import rampup

# A node that is about to go is looked for every so many steps: all workers ask
# together, which takes some milliseconds.
STEPS_BETWEEN_LOOKS = 10


def train(given: dict[str, rampup.Config]) -> None:
    """Train in a worker, which Ray has joined to the others, from the newest checkpoint
    to the end or to a preemption.
    """
    logging.getLogger("absl").setLevel(
        logging.WARNING
    )  # Ray shows every message of a worker, also those about checkpoints
    calls = itertools.count(1)

    def node_is_going() -> bool:
        return (
            next(calls) % STEPS_BETWEEN_LOOKS == 0
            and ray.train.get_preemption_info() is not None
        )

    config = given["config"]
    summary = rampup.train(
        config,
        rampup.TrainProgress(log_period=config.log_period),
        should_stop=node_is_going,
    )
    # Every worker reports, and the first one says what. The checkpoint stays where it
    # is.
    is_first, saved = ray.train.get_context().get_world_rank() == 0, summary.checkpoint
    ray.train.report(
        {
            "steps": summary.steps,
            "loss": summary.final_loss,
            "resumed_from": summary.resumed_from,
        },
        checkpoint=Checkpoint(saved) if is_first and saved else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
    if summary.interrupted:
        # A function that returns is done for Ray. It ends the workers when the node
        # goes, and starts them without it.
        threading.Event().wait()


def main(words: list[str] | None = None) -> Result:
    """Start the workers, wait until the run is done, and return what they reported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="a YAML file, or the name of a shipped one")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        required=True,
        help="their number, or the smallest and the largest",
    )
    parser.add_argument("--device", choices=("cpu", "gpu", "tpu"), default="gpu")
    parser.add_argument(
        "--per-worker", type=int, default=1, help="CPUs, GPUs or chips of a worker"
    )
    parser.add_argument("--topology", help="of a TPU slice, such as 4x4")
    parser.add_argument("--accelerator-type", help="of a TPU slice, such as TPU-V6E")
    given = parser.parse_intermixed_args(words)
    config = rampup.load_config(given.config, given.settings)
    if not config.run_name:
        parser.error(
            "run_name=NAME is needed: it tells workers that start again which run they"
            " resume"
        )
    smallest, largest = given.workers[0], given.workers[-1]
    tpu, gpu = given.device == "tpu", given.device == "gpu"
    try:
        # A number of devices on which a phase cannot run is refused here and not in the
        # middle. TPU workers come in slices.
        for workers in range(smallest, largest + 1, smallest if tpu else 1):
            rampup.build_plan(config, workers * (given.per_worker if tpu or gpu else 1))
    except rampup.RampupError as error:
        parser.error(f"{workers} workers cannot run this: {error}")
    trainer = JaxTrainer(
        train,
        train_loop_config={"config": config},
        # Ray joins CPU workers too if it is told that they have TPUs, and JAX that they
        # have none.
        jax_config=JaxConfig(use_tpu=not gpu, use_gpu=gpu),
        scaling_config=ScalingConfig(
            num_workers=smallest if smallest == largest else (smallest, largest),
            use_gpu=gpu,
            use_tpu=tpu,
            topology=given.topology,
            accelerator_type=given.accelerator_type,
            resources_per_worker={given.device.upper(): given.per_worker},
        ),
        run_config=RunConfig(
            # Ray's folder of the run is rampup's, so that Ray takes the checkpoints in
            # it for its own.
            storage_path=os.path.abspath(config.base_output_directory),
            name=config.run_name,
            # A worker that dies, or an error. A node that goes after a notice does not
            # count.
            failure_config=FailureConfig(max_failures=10),
            worker_runtime_env=(
                {"env_vars": {"JAX_PLATFORMS": "cpu"}} if given.device == "cpu" else {}
            ),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    result = main()
    print(result.metrics, result.checkpoint)
