"""What MaxText's configuration says about a ramp in one executable: what is refused, and which design its gradients have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from rampup.errors import ConfigError, ResumeMismatchError
from rampup.plan.per_device import RampupBatchManager
from rampup.plan.ramp import BatchRamp

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


def value_of(config: Any, key: str) -> Any:
    """Return a value of MaxText's configuration, and that of an enumeration as text."""
    value = getattr(config, key)
    return getattr(value, "value", value)
