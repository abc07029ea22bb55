"""MaxText's reinforcement learning (rl.yml, on Tunix): its keys. All sizes, also micro batches, count prompts of the job."""

from __future__ import annotations

from rampup.dialects.maxtext import AXIS_GROUPS
from rampup.dialects.reading import Entry, entry

BATCH, GENERATIONS, ITERATIONS = "batch_size", "rl.num_generations", "rl.num_iterations"
LOSS = "rl.loss_agg_mode"
LOSSES = {
    "token-mean": "every token of the batch counts alike, so long responses weigh more",
    "sequence-mean-token-mean": "every response counts alike, whatever its length",
    "sequence-mean": "not known to Tunix",
}
TRAIN, ROLLOUT, OLD = "train_micro_batch_size", "rollout_micro_batch_size", "micro_batch_size"
ROLLOUT_AXES = ("rollout_tensor_parallelism", "rollout_data_parallelism", "rollout_expert_parallelism")
SLICES = ("num_trainer_slices", "num_samplers_slices")
AXES = tuple(f"ici_{axis}_parallelism" for axes in AXIS_GROUPS.values() for axis in axes)
FSDP, TENSOR = "ici_fsdp_parallelism", "ici_tensor_parallelism"
AUTO = -1

KEYS: dict[str, Entry] = {
    BATCH: entry(1, "prompts per training step and optimizer step", unit="prompts", scope="job"),
    TRAIN: entry(AUTO, "prompts per backward pass; -1 = batch_size", unit="prompts", scope="job"),
    ROLLOUT: entry(AUTO, "prompts per generate call; -1 = the train micro batch", unit="prompts", scope="job"),
    OLD: entry(None, "older name of both", unit="prompts", scope="job"),
    GENERATIONS: entry(2, "responses per prompt", unit="samples"),
    ITERATIONS: entry(1, "optimizer steps per batch"),
    LOSS: entry("sequence-mean-token-mean", "how the loss of a batch is averaged", kind="text", choices=tuple(LOSSES)),
    "rl.use_agentic_rollout": entry(False, "the agentic learner", kind="bool"),
    "num_batches": entry(4, "batches of an epoch"),
    "num_epoch": entry(1, "passes over the prompts"),
    "train_fraction": entry(1.0, "share of the batches that is used", kind="float"),
    "num_test_batches": entry(5, "evaluation batches"),
    "eval_batch_size": entry(AUTO, "prompts per evaluation batch; -1 = batch_size", unit="prompts"),
    "test_batch_start_index": entry(0, "first evaluation prompt", unit="prompts"),
    "eval_interval": entry(10, "optimizer steps between evaluations", unit="steps"),
    "trainer_devices_fraction": entry(0.5, "share of the devices that train", kind="float"),
    "sampler_devices_fraction": entry(0.5, "share of the devices that generate", kind="float"),
    "chips_per_vm": entry(4, "devices of a host", minimum=1, unit="devices"),
    "use_pathways": entry(True, "whether one controller sees all hosts", kind="bool"),
    SLICES[0]: entry(AUTO, "slices that train", unit="slices"),
    SLICES[1]: entry(AUTO, "slices that generate", unit="slices"),
    "rollout_data_parallelism": entry(AUTO, "replicas of the generator; -1 = the rest"),
    "rollout_tensor_parallelism": entry(1, "devices that share the generator's matrices; -1 = the rest"),
    "rollout_expert_parallelism": entry(1, "devices that share its experts; -1 = the rest"),
    "max_prefill_predict_length": entry(256, "longest prompt", minimum=1, unit="tokens"),
    "max_target_length": entry(1024, "longest prompt and response", minimum=1, unit="tokens"),
    **{axis: entry(AUTO if axis == FSDP else 1, "devices along this axis", minimum=1, also=(AUTO,)) for axis in AXES},
    "num_devices": entry(None, "devices of the run; given as num_devices=N", minimum=1, unit="devices"),
    "num_prompts": entry(None, "prompts of the data set after its filter; given as num_prompts=N", minimum=0, unit="prompts"),
}  # fmt: skip
_DATASET = (
    *("batch_size", "num_batches", "num_test_batches", "eval_batch_size", "test_batch_start_index", "train_fraction"),
    *(TRAIN, ROLLOUT, OLD),
)
_CLUSTER = (*ROLLOUT_AXES, *SLICES, "trainer_devices_fraction", "sampler_devices_fraction", "chips_per_vm", "use_pathways")
ALIASES = {
    **{f"dataset.{name}": name for name in _DATASET},
    **{f"cluster.{name}": name for name in _CLUSTER},
    **{name.removeprefix("rl."): name for name in KEYS if name.startswith("rl.")},
    "dataset_prompts": "num_prompts",
}
