"""Find the largest microbatch that fits in memory, and time it.

`tune` tries configurations that leave the ramp unchanged and only split its batches
differently, all of them into one microbatch size. Their programs are compiled and not
run, smallest microbatch first, so nothing runs out of memory. The one with the largest microbatch that fits then runs a
few steps on synthetic rows. With a topology nothing runs: a configuration fits if the
compiler for these absent TPU slices accepts its program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax

from rampup.config.build import build_plan, with_slices
from rampup.config.schema import Config
from rampup.contrib.lab.largest import MARGIN, largest_of, memory_limit
from rampup.contrib.lab.memory import room_to_run
from rampup.contrib.lab.programs import Trial
from rampup.contrib.lab.topology import compiler_version, topology_devices
from rampup.engine.compile import enable_compilation_cache
from rampup.errors import ConfigError, RampupError
from rampup.lm.train import unconstrained
from rampup.plan.numbers import GIB, finite_or_none, parse_memory_gib
from rampup.plan.plan import RampPlan
from rampup.plan.topology import NOT_RUN_ON, Topology

# Of `RampPlan.phase_rows`.
PHASE_KEYS = (
    "start_step",
    "global_batch_size",
    "per_device_batch_size",
    "accumulation_steps",
    "num_pipeline_microbatches",
    "microbatch_size",
)
Report = Callable[[str], None]
# The result as JSON: docs/reference/json_output.md says what its keys mean.
Facts = dict[str, Any]


def tune(
    config: Config,
    *,
    memory_gib: str | float | None = None,
    num_devices: int | None = None,
    topology: Topology | str | None = None,
    report: Report = lambda line: None,
) -> Facts:
    """Return what `rampup tune --json` prints. `memory_gib` is that of one device;
    None = the devices' own.
    """
    if config.gradient_accumulation != "fused":
        raise ConfigError(
            f"gradient_accumulation={config.gradient_accumulation} is not tuned, only"
            " fused",
            key="gradient_accumulation",
            nearest=("fused",),
        )
    slices = Topology.parse(topology) if isinstance(topology, str) else topology
    if slices is None:
        devices = _devices_here(num_devices)
        limit, margin = memory_limit(memory_gib, devices), MARGIN
        enable_compilation_cache(config.jax_cache_dir)
    else:
        config = with_slices(config, slices)
        limit = _limit_of(slices, memory_gib, num_devices)
        devices = topology_devices(slices)
        margin = Fraction(0)  # the compiler itself keeps what it needs
    usable = int(limit * (1 - margin))
    trials, next_larger = _search(config, devices, usable, slices, report)
    fitting = [size for size, trial in trials.items() if trial.bytes <= usable]
    facts = {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "memory_gib": limit / GIB,
        "margin": float(margin),
        "usable_bytes": usable,
        "largest_microbatch": max(fitting, default=None),
        "next_larger": next_larger,
        "candidates": [
            {
                "microbatch_size": size,
                "bytes": finite_or_none(trial.bytes),
                "fits": size in fitting,
            }
            for size, trial in sorted(trials.items())
        ],
        "settings": None,
        "phases": [],
    }
    if slices is not None:
        facts["topology"] = slices.name
        facts["compiled_for"] = f"{NOT_RUN_ON}, so no time is known"
        facts["compiler"] = compiler_version()
    if fitting:
        best, times = trials[max(fitting)], dict[int, float]()
        if slices is None and best.bytes <= room_to_run(devices):
            report(f"timing the microbatch of {max(fitting):,}")
            times = best.times()
        before = config.to_dict()
        facts["settings"] = {
            key: value
            for key, value in best.config.to_dict().items()
            if value != before[key]
        }
        facts["phases"] = _phases(best, times)
    return facts


def _devices_here(number: int | None) -> Sequence[jax.Device]:
    """Return so many devices of this machine, or all."""
    devices = jax.devices()
    if number is None:
        return devices
    if not 1 <= number <= len(devices):
        raise ConfigError(
            f"--devices={number} must be from 1 to {len(devices)}, the devices of this"
            " machine; --fake-devices N simulates N",
            key="devices",
            nearest=(min(max(number, 1), len(devices)),),
        )
    return devices[:number]


def _limit_of(
    slices: Topology, memory_gib: str | float | None, num_devices: int | None
) -> int:
    """Return the bytes of a device of absent slices that a program may use."""
    if num_devices is not None:
        raise ConfigError(
            "--devices counts devices of this machine; leave it out with --topology",
            key="devices",
        )
    limit = slices.hbm_bytes if memory_gib is None else parse_memory_gib(memory_gib)
    if limit > slices.hbm_bytes:
        most = slices.hbm_bytes / GIB
        raise ConfigError(
            f"a device of {slices.name} has {most:.4g} GiB; --memory-gib can only name"
            " less",
            key="memory-gib",
            nearest=(most,),
        )
    return limit


def problem_of(facts: Facts) -> ConfigError | None:
    """Return the error to report if no settings can be recommended."""
    if facts["settings"] is not None:
        return None
    smallest = facts["candidates"][0]
    needs = "more than the compiler could place"
    if smallest["bytes"] is not None:
        needs = f"{smallest['bytes']:,} bytes"
    return ConfigError(
        f"no microbatch fits: a step with microbatch_size={smallest['microbatch_size']}"
        f" needs {needs} of each device's {facts['usable_bytes']:,} usable bytes",
        fix="remat_policy=full, ici_fsdp_parallelism=2 and"
        " shard_optimizer_over_data=true save memory",
        key="microbatch_size",
    )


def _search(
    config: Config,
    devices: Sequence[jax.Device],
    usable: int,
    topology: Topology | None,
    report: Report,
) -> tuple[dict[int, Trial], int | None]:
    """Compile configurations; return them by their microbatch, and the next one after
    those that fit, which was tried and does not; None if there is none.
    """
    made = one_shape(config, build_plan(config, len(devices)))
    if not made:
        raise ConfigError(
            "no microbatch_size splits every phase with gradient_accumulation_steps="
            f"{config.gradient_accumulation_steps} and leaves the ramp unchanged",
            key="microbatch_size",
        )
    limit = None if topology is None else usable
    trials: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        plan = build_plan(made[size], len(devices))
        trial = Trial(made[size], plan, devices, topology=topology, limit=limit)
        trials[size] = trial
        report(f"microbatch of {size:,}: {trial.bytes / 2**20:,.1f} MiB")
        return trial.bytes <= usable

    _, larger = largest_of(sorted(made), fits)
    return trials, larger


def one_shape(config: Config, plan: RampPlan) -> dict[int, Config]:
    """Return the configuration with every microbatch size that divides every phase, by
    that size.
    """
    found = {}
    for size in unconstrained(plan.splitter).legal_microbatches(plan.ramp.sizes):
        made = replace(config, rampup_microbatch="fixed", microbatch_size=size)
        if _can_run(made, plan):
            found[size] = made
    return found


def _can_run(made: Config, plan: RampPlan) -> bool:
    """Return whether other microbatches are legal with the configuration's own
    accumulation, and leave the ramp unchanged.
    """
    try:
        found = build_plan(made, plan.num_devices)
    except RampupError:
        return False
    # An evaluation in larger microbatches would be a program that nobody has compiled.
    evaluation, size = found.eval_split, found.splits[0].microbatch_size
    is_small = evaluation is None or evaluation.microbatch_size <= size
    return is_small and found.ramp.phases == plan.ramp.phases


def _phases(trial: Trial, times: dict[int, float]) -> list[Facts]:
    """Return the phases of a configuration, with memory and speed."""
    phases = []
    for split, row in zip(trial.plan.splits, trial.plan.phase_rows(), strict=True):
        seconds = finite_or_none(trial.step_seconds(split, times))
        tokens = split.global_batch_size * trial.config.max_target_length
        phases.append(
            {name: row[name] for name in PHASE_KEYS}
            | {
                "bytes": trial.bytes,
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds if seconds else None,
            }
        )
    return phases
