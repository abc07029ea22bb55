"""MaxText's pre-training through a whole batch ramp in one executable: `python -m rampup.integrations.maxtext base.yml ...`.

MaxText's own `main` runs, with MaxText's own keys. `install` replaces three of its names: the manager of the ramp, the loader
of batches, and the function that accumulates gradients. Every batch has the shape of the final one. Rows that a batch does not
have are padding without targets, and microbatches of nothing but padding are not run.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from etils import epath
from rich.console import Console

from rampup.errors import ConfigError, MissingDependencyError, RampupError, ResumeMismatchError, raise_together
from rampup.integrations.maxtext_step import RampLoader, accumulated_gradients, loop_gradients, value_of
from rampup.plan.per_device import RampupBatchManager
from rampup.plan.ramp import BatchRamp
from rampup.show.console import MAX_PHASES, make_table

VERSION = "0.2.5"
TRAIN, UTILS = "maxtext.trainers.pre_train.train", "maxtext.utils.train_utils"
GRADIENTS = "gradient_accumulation_loss_and_grad"
# What is replaced or used, with the arguments that it has in this version.
NAMES = {
    (TRAIN, "main"): "argv",
    (TRAIN, GRADIENTS): "_loss_fn config model params params_shardings data dropout_rng",
    (UTILS, "create_rampup_manager"): "config checkpoint_manager",
    (UTILS, "create_dataloader"): "config mesh data_iterator goodput_recorder rampup_manager",
    ("maxtext.common.data_loader", "DataLoader"): "config mesh data_iterator goodput_recorder",
    ("maxtext.common.checkpointing", "latest_step"): "checkpoint_manager",
}
# Keys that a ramp in one executable needs as they are here, with the reason.
NEEDED = {
    "enable_diloco": (False, "its batches have an axis of replicas"),
    "ici_pipeline_parallelism": (1, "MaxText's pipeline splits a batch into microbatches of its own"),
    "dcn_pipeline_parallelism": (1, "MaxText's pipeline splits a batch into microbatches of its own"),
    "use_tunix_gradient_accumulation": (False, "it divides each microbatch by its own tokens, also one without any"),
    "training_objective": ("causal_lm", "other objectives have masks of their own"),
    "te_moe_block": (False, "it takes the smallest capacity of all microbatches, also of those that do not run"),
    "expansion_factor_real_data": (-1, "the position of loaders that some hosts do not have is saved elsewhere"),
    "colocated_python_data_input": (False, "the position of remote loaders is saved elsewhere"),
    "elastic_enabled": (False, "its batches follow the devices that are alive"),
    "load_full_state_path": ("", "the place in the ramp follows from the checkpoints of the run itself"),
}
# Keys with which `rampup.accumulate` gives MaxText's numbers. It needs `data` and `fsdp` as the only axes, too.
ACCUMULATED = {
    "shard_mode": "auto",
    "attention": "dot_product",
    "shard_optimizer_over_data": False,
    "num_experts": 1,
    "mtp_num_layers": 0,
    "use_indexer": False,
    "num_vocab_tiling": 1,
    "quantization": "",
    "dropout_rate": 0.0,
    "use_multimodal": False,
    "use_qk_clip": False,
    "record_internal_nn_metrics": 0,
    "parameter_memory_host_offload": False,
    "z_loss_multiplier": 0.0,
}
AUXILIARY = {"num_experts": 1, "mtp_num_layers": 0, "use_indexer": False}


def main(argv: Sequence[str]) -> None:
    """Run MaxText's pre-training with MaxText's command line: a program name, a file, and key=value.

    Raises:
        ConfigError: MaxText is of another version, or the keys ask for what a ramp in one executable does not have.
        ResumeMismatchError: the checkpoints of this run are of another ramp.
    """
    train = install()
    from absl import flags  # MaxText and Grain's worker processes read some

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(argv[:1])
    train.main(list(argv))


def install() -> Any:
    """Replace the three names of MaxText, and return the module whose `main` is to be run.

    Raises:
        MissingDependencyError: MaxText or a package that it needs is not installed.
        ConfigError: this version of MaxText has other names or arguments.
    """
    found: dict[str, Any] = {}
    if hasattr(sys.modules.get(TRAIN), "_rampup"):
        return sys.modules[TRAIN]
    for (module, name), arguments in NAMES.items():
        try:
            found[name] = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("maxtext."):
                raise MissingDependencyError(
                    f"rampup.integrations.maxtext runs MaxText, but the package {error.name} is not installed; install "
                    f"maxtext=={VERSION} and what it needs"
                ) from None
            found[name] = None
        own = found[name] and [each for each in inspect.signature(found[name]).parameters if each != "self"]
        if own != arguments.split() or (name == GRADIENTS and "scan" not in found[name].__code__.co_names):
            raise ConfigError(
                f"{module}.{name}({arguments.replace(' ', ', ')}) of MaxText {VERSION} is not in the installed version, "
                f"{importlib.import_module('maxtext').__version__}, or has changed; rampup works with maxtext=={VERSION}"
            )
    train, utils = importlib.import_module(TRAIN), importlib.import_module(UTILS)
    latest_step, maxtexts, loader = found["latest_step"], found[GRADIENTS], found["DataLoader"]

    def create_rampup_manager(config: Any, checkpoint_manager: Any) -> RampupBatchManager | None:
        if not config.enable_rampup_batch_size:
            return None
        label = latest_step(checkpoint_manager) if checkpoint_manager else None
        # MaxText writes the checkpoint with label s after s + 1 steps.
        manager = RampupBatchManager(config, 0 if label is None else label + 1)
        raise_together(list(problems(config, manager.ramp)))
        check_record(config, manager)
        return manager

    def create_dataloader(config: Any, mesh: Any, data_iterator: Any, recorder: Any, manager: Any) -> Any:
        own = loader(config, mesh, data_iterator, recorder)
        if manager is None:
            return own
        if jax.process_index() == 0:
            print_plan(config, mesh, manager.ramp)
        # MaxText shows its speed from this step on. Its own count of the steps ignores fractions of a sample per device.
        config.get_keys()["rampup_end_step"] = manager.total_rampup_steps
        return RampLoader(own, config, manager)

    def gradients(loss_fn: Any, config: Any, model: Any, *args: Any) -> tuple[Any, Any, Any]:
        if not config.enable_rampup_batch_size:
            return maxtexts(loss_fn, config, model, *args)  # type: ignore[no-any-return]
        if choose_design(config, model.mesh)[0] == "accumulate":
            return accumulated_gradients(loss_fn, config, model, *args)
        return loop_gradients(maxtexts, loss_fn, config, model, *args)

    utils.create_rampup_manager, utils.create_dataloader = create_rampup_manager, create_dataloader
    setattr(train, GRADIENTS, gradients)
    train._rampup = True
    return train


def problems(config: Any, ramp: BatchRamp) -> Iterator[ConfigError]:
    """Yield what a ramp in one executable does not have."""
    K, B = config.gradient_accumulation_steps, ramp.sizes[-1]
    if K < 2 or B % K:
        fitting = next(n for n in range(2, B + 1) if B % n == 0)
        yield ConfigError(
            f"gradient_accumulation_steps={K} is the number of microbatches of the final batch of {B} samples, but a ramp in "
            "one executable needs 2 or more, of whole samples: a batch runs as many as it fills; set "
            f"gradient_accumulation_steps={fitting}, and the sizes per device so that the batches stay",
            key="gradient_accumulation_steps",
            nearest=(fitting,),
        )
        return
    for key, (needed, why) in NEEDED.items():
        if (value := value_of(config, key)) != needed:
            setting = f"{key}={str(needed).lower()}"
            yield ConfigError(f"{key}={value} excludes a ramp: {why}; set {setting}", key=key, nearest=(needed,))
    partial = [size for size in ramp.sizes if size % (B // K)]
    for key, needed in AUXILIARY.items():
        if partial and (value := value_of(config, key)) != needed:
            yield ConfigError(
                f"with {key}={value}, every batch must be a multiple of the microbatch of {B // K} samples, as padding would "
                f"count in the auxiliary loss; the ramp has {partial[0]}",
                key="per_device_batch_size_increment",
            )


def check_record(config: Any, manager: RampupBatchManager) -> None:
    """Keep the ramp beside the checkpoints of a new run, and refuse those of another ramp: the rows that they used differ."""
    if not config.enable_checkpointing:
        return
    file = epath.Path(config.checkpoint_dir).parent / "rampup.json"
    record = {"global_batch_size_to_load": config.global_batch_size_to_load, "ramp": manager.ramp.to_rows()}
    if manager.step == 0:
        if jax.process_index() == 0:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record))
        return
    here = f"{config.checkpoint_dir} has checkpoints after {manager.step} steps"
    if not file.exists():
        raise ResumeMismatchError(f"{here}, but no ramp of rampup beside them; start the ramp with another run_name")
    before = json.loads(file.read_text())
    if before != record:
        raise ResumeMismatchError(
            f"{here}, of a run that loads {before['global_batch_size_to_load']} rows at once with another ramp; here "
            f"{config.global_batch_size_to_load} are loaded:\n{manager.ramp.differences(before['ramp'])}"
        )


def choose_design(config: Any, mesh: Any) -> tuple[str, str]:
    """Return the design of the gradients, `loop` or `accumulate`, and why."""
    others = [name for name, size in mesh.shape.items() if size > 1 and name not in ("data", "fsdp")]
    keys = [
        f"{key}={value_of(config, key)}" for key, needed in ACCUMULATED.items() if (value_of(config, key) or needed) != needed
    ]
    if mesh.shape.get("data", 1) == 1:
        return "loop", "the data axis has one device, so there is no reduction to save"
    if config.global_batch_size_to_load != config.global_batch_size_to_train_on:
        keys.append(f"per_device_batch_size={config.per_device_batch_size}")
    if others or keys:
        return "loop", f"{(keys + [f'the mesh axis {name}' for name in others])[0]} needs MaxText's own accumulation"
    return "accumulate", "it reduces the gradients over the data axis once per step, not once per microbatch"


def print_plan(config: Any, mesh: Any, ramp: BatchRamp) -> None:
    """Print the phases of the ramp, and the design with its reason."""
    console, micro = Console(), ramp.sizes[-1] // config.gradient_accumulation_steps
    phases = [phase for phase in ramp.phases if phase.start_step < config.steps]
    shown = phases if len(phases) <= MAX_PHASES else [*phases[: MAX_PHASES - 1], phases[-1]]
    titles = ("from step", "from sample", "global batch", f"microbatches of {micro}")
    sizes = ((phase.start_step, phase.start_sample, phase.global_batch_size) for phase in shown)
    rows = [[f"{n:,}" for n in (step, sample, size, -(-size // micro))] for step, sample, size in sizes]
    design, why = choose_design(config, mesh)
    console.print(make_table(console, titles, rows))
    if hidden := len(phases) - len(shown):
        console.print(f"{hidden} phases before the last are left out")
    console.print(f"rampup: one executable for all batches; design {design}: {why}", highlight=False, soft_wrap=True)
    local = config.enable_emergency_checkpoint or config.enable_multi_tier_checkpointing
    if config.enable_checkpointing and config.dataset_type != "synthetic" and (local or config.dataset_type != "grain"):
        kind = "these checkpoints" if local else f"dataset_type={config.dataset_type}"
        console.print(f"rampup: MaxText saves no position in the data with {kind}: a resume begins with the first rows again")


if __name__ == "__main__":
    try:
        install()
        from absl import app  # MaxText's own way to start, which prints its log

        app.run(main)
    except RampupError as error:
        sys.exit(f"error: {error}")
