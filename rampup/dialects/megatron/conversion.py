"""Megatron's run in our keys."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rampup.config.build import build_plan
from rampup.config.schema import KEYS, Config
from rampup.dialects.megatron.job import DECREASE, GLOBAL, GROUP, MICRO, PER_CHUNK, VIRTUAL, MegatronFile
from rampup.dialects.megatron.keys import RAMP, SCHEDULE
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Conversion
from rampup.errors import RampupError

_DEVICES = ("world_size", "data_parallel_size", "nnodes", "nproc_per_node", "num_nodes", "devices")
_AXES = {
    "ici_tensor_parallelism": "tensor_model_parallel_size",
    "ici_context_parallelism": "context_parallel_size",
    "ici_pipeline_parallelism": "pipeline_model_parallel_size",
}
_EXPRESSED = {
    *(MICRO, GLOBAL, DECREASE, RAMP, SCHEDULE, VIRTUAL, PER_CHUNK, "num_layers", "seq_length", "train_iters", "max_steps"),
    *("train_samples", "eval_global_batch_size", *_DEVICES, *_AXES.values()),
}


def convert(file: MegatronFile, settings: Settings) -> Conversion:
    """Return the same run in our keys, or why they cannot say it."""
    if file.ramp is None or not file.cut:
        return Conversion(refusal="not every batch of the file can be cut")
    counts = sorted({size // file.unit for size in file.sizes})
    if file.stages > 1 and len(counts) > 1 and (uneven := [count for count in counts if count % file.stages]):
        return Conversion(
            refusal=f"rampup's pipeline takes a growing number of microbatches in multiples of its {file.stages} stages, but "
            f"the file has phases of {uneven[0]}"
        )
    values = _values(file, counts)
    try:
        build_plan(Config(**values))
    except RampupError as error:
        return Conversion(refusal=str(error))
    left_out = dict.fromkeys(sorted(settings.given - _EXPRESSED), "no counterpart")
    if GROUP in left_out:
        left_out[GROUP] = "no counterpart: rampup sends all microbatches round together"
    for name in sorted(settings.others):
        left_out[name] = "not converted; rampup has a key of this name" if name in KEYS else "no counterpart"
    return Conversion(values=values, left_out=left_out)


def _values(file: MegatronFile, counts: list[int]) -> dict[str, Any]:
    assert file.ramp is not None
    values: dict[str, Any] = {
        "num_devices": file.num_devices,
        **{ours: file[theirs] for ours, theirs in _AXES.items()},
        "microbatch_size": file.micro,
        "steps": _total_steps(file),
        "learning_rate_clock": "samples",
        "eval_interval": -1,
        **_ramp_values(file),
    }
    if file["seq_length"] is not None:
        values["max_target_length"] = file["seq_length"]
    if file["eval_global_batch_size"] is not None:
        values["eval_per_device_batch_size"] = Fraction(file["eval_global_batch_size"], file.num_devices)
    if file.stages > 1:
        chunks = file.stages * file.chunks
        layers = chunks if file["num_layers"] is None else file["num_layers"]
        values |= {
            "num_pipeline_microbatches": counts[0] if len(counts) == 1 else -1,
            "pipeline_strict_multiple": False,
            "num_pipeline_repeats": file.chunks,
            "base_num_decoder_layers": layers,
            "num_layers_per_pipeline_stage": max(layers // chunks, 1),
        }
    return values


def _ramp_values(file: MegatronFile) -> dict[str, Any]:
    """The linear keys where Megatron's ramp is one, thresholds otherwise."""
    assert file.ramp is not None
    linear = None if file[SCHEDULE] is not None else file.linear
    if file[SCHEDULE] is not None:
        return {"batch_size_schedule": _schedule([(entry.samples, entry.size) for entry in file.thresholds])}
    if linear is not None and linear.unit > 1:
        return {"batch_size_schedule": _schedule(linear.thresholds())}
    values: dict[str, Any] = {"per_device_batch_size": Fraction(file.ramp.sizes[-1], file.num_devices)}
    if linear is None:
        return values
    return values | {
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": Fraction(linear.start, file.num_devices),
        "per_device_batch_size_increment": Fraction(linear.increment, file.num_devices),
        "global_rampup_samples": linear.samples,
        "rampup_carry_overshoot": True,
    }


def _schedule(pairs: list[tuple[int, int]]) -> str:
    return " ".join(f"{threshold}:{size}" for threshold, size in pairs)


def _total_steps(file: MegatronFile) -> int:
    """The optimizer steps of the run; where the file does not say, those of the ramp and one more."""
    assert file.ramp is not None
    if file["train_samples"]:
        return max(file.ramp.step_of_sample(int(file["train_samples"])), 1)
    steps = file["train_iters"] or file["max_steps"] or 0
    return int(steps) if steps > 0 else file.ramp.ramp_steps + 1
