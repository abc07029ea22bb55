"""Find the largest microbatch that fits in memory and the settings that make the run
fastest.

`tune` tries configurations that leave the ramp unchanged and only split its batches
differently. Their programs are compiled and not run, smallest microbatch first, so
nothing runs out of memory. Those with the largest microbatches that fit then run a few
steps on synthetic rows, and the measured times rank them. With a topology nothing runs:
a configuration fits if the compiler for these absent TPU slices accepts its programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax

from rampup.config.build import build_plan, with_slices
from rampup.config.schema import PER_ACCUMULATION_KEYS, Config
from rampup.contrib.lab.largest import MARGIN, largest_of, memory_limit
from rampup.contrib.lab.programs import Report, Timing, Trial, take_turns
from rampup.contrib.lab.topology import compiler_version, topology_devices
from rampup.engine.compile import enable_compilation_cache
from rampup.engine.memory import peak_bytes, room_to_run
from rampup.errors import ConfigError, RampupError
from rampup.lm.train import unconstrained
from rampup.plan.numbers import (
    GIB,
    finite_or_none,
    parse_memory_gib,
    to_yaml_number,
)
from rampup.plan.plan import RampPlan
from rampup.plan.topology import NOT_RUN_ON, Topology

# Relative differences of times below this are ties. The configuration with fewer
# programs then wins.
TIE_TOLERANCE = 0.05
NEAR_THE_TOP = 3  # the largest microbatches that are worth timing
# Of `RampPlan.phase_rows`.
PHASE_KEYS = (
    "start_step",
    "global_batch_size",
    "per_device_batch_size",
    "accumulation_steps",
    "num_pipeline_microbatches",
    "microbatch_size",
)
# The result as JSON: docs/reference/json_output.md says what its keys mean.
Facts = dict[str, Any]
# Of a trial, by the first steps of the phases that were timed.
Times = Mapping[int, Timing]


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
    search = _Search(config, devices, usable, slices, report)
    largest, next_larger = search.run()
    timed = [] if slices else search.worth_timing()
    times = _times(timed, report)
    facts: Facts = {
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "memory_gib": limit / GIB,
        "memory_is_named": memory_gib is not None,
        "margin": float(margin),
        "usable_bytes": usable,
        "largest_microbatch": largest,
        "next_larger": next_larger,
        "measured_peak_bytes": peak_bytes(devices) if times else None,
        "candidates": [
            _candidate(trial, times.get(id(trial), {}), usable)
            for trial in sorted(search.trials, key=lambda each: each.microbatch_size)
        ],
        "settings": None,
        "run_seconds": None,
        "phases": [],
        "alternatives": [],
        "notes": [],
    }
    if slices is not None:
        facts["topology"] = slices.name
        facts["compiled_for"] = f"{NOT_RUN_ON}, so no time is known"
        facts["compiler"] = compiler_version()
    if fitting := timed or search.fitting():
        facts |= _recommended(config, fitting, times)
    return facts


def _devices_here(number: int | None) -> Sequence[jax.Device]:
    """Return so many devices of this machine, or all."""
    devices = jax.devices()
    if number is None:
        return devices
    if not 1 <= number <= len(devices):
        raise ConfigError(
            f"--devices={number} must be between 1 and the {len(devices)} devices of"
            f" this machine; --fake-devices {number} simulates them",
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


class _Search:
    """The configurations that were compiled, as `trials`."""

    def __init__(
        self,
        config: Config,
        devices: Sequence[jax.Device],
        usable: int,
        topology: Topology | None,
        report: Report,
    ) -> None:
        self.trials: list[Trial] = []
        self._config, self._devices, self._report = config, devices, report
        self._usable, self._topology = usable, topology
        self._plan = build_plan(config, len(devices))

    def run(self) -> tuple[int | None, int | None]:
        """Compile configurations; return the largest microbatch that fits, and the next
        one, which was tried and does not; None if there is none.
        """
        shared = one_shape(self._config, self._plan)
        if not shared:
            raise ConfigError(
                "no microbatch_size splits every phase and leaves the ramp unchanged",
                key="microbatch_size",
            )
        largest, larger = largest_of(
            sorted(shared), lambda size: self._fits(shared[size])
        )
        if largest is None:
            return None, larger
        final = two_shapes(self._config, self._plan, largest)
        last, beyond = largest_of(sorted(final), lambda size: self._fits(final[size]))
        return last or largest, beyond or larger

    def _fits(self, config: Config) -> bool:
        plan = build_plan(config, len(self._devices))
        limit = None if self._topology is None else self._usable
        trial = Trial(config, plan, self._devices, topology=self._topology, limit=limit)
        self.trials.append(trial)
        self._report(
            f"microbatch of {trial.microbatch_size:,}: {trial.bytes / 2**20:,.1f} MiB"
        )
        return trial.bytes <= self._usable

    def fitting(self) -> list[Trial]:
        """Return the trials that fit, those of the configuration's own policy first,
        then those with the largest microbatches.
        """
        found = [trial for trial in self.trials if trial.bytes <= self._usable]
        own = self._config.rampup_microbatch
        return sorted(
            found,
            key=lambda each: (
                each.config.rampup_microbatch != own,
                -each.microbatch_size,
            ),
        )

    def worth_timing(self) -> list[Trial]:
        """Return the fitting trials with the largest microbatches that can run here."""
        room = room_to_run(self._devices)
        found = [trial for trial in self.fitting() if trial.bytes <= room]
        kept: list[Trial] = []
        for policy in ("fixed", "auto"):
            same = [each for each in found if each.config.rampup_microbatch == policy]
            kept += same[:NEAR_THE_TOP]
        return [trial for trial in found if trial in kept]


def one_shape(config: Config, plan: RampPlan) -> dict[int, Config]:
    """Return `fixed` with every microbatch size that divides every phase, by that."""
    found = {}
    for size in unconstrained(plan.splitter).legal_microbatches(plan.ramp.sizes):
        for accumulation in (config.gradient_accumulation_steps, 1):
            made = _split_by(config, plan, "fixed", size, accumulation)
            if made is not None and size not in found:
                found[size] = made
    return found


def two_shapes(config: Config, plan: RampPlan, largest: int) -> dict[int, Config]:
    """Return `auto`, with a microbatch size of at most `largest` for the ramp and a
    larger one for the phase after it, by the latter.
    """
    splitter, last = unconstrained(plan.splitter), plan.ramp.sizes[-1]
    shared = splitter.legal_microbatches(plan.ramp.sizes)
    found = {}
    for size in splitter.legal_microbatches([last]):
        # The accumulation applies to every phase, so the largest shared size may be too
        # large for the first.
        accumulation = splitter.largest_microbatch(last) // size
        for of_ramp in shared:
            if of_ramp <= largest < size:
                made = _split_by(config, plan, "auto", of_ramp, accumulation)
                found |= {} if made is None else {size: made}
    return found


def _split_by(
    config: Config, plan: RampPlan, policy: str, size: int, accumulation: int
) -> Config | None:
    """Return the configuration with other microbatches if it is legal and leaves the
    ramp unchanged.
    """
    settings: dict[str, Any] = {
        "rampup_microbatch": policy,
        "microbatch_size": size,
        "gradient_accumulation_steps": accumulation,
    }
    own = config.gradient_accumulation_steps
    if accumulation != own and config.batch_size_schedule is None:
        # Every global batch stays as it is.
        names: Iterable[str] = ("per_device_batch_size",)
        if config.enable_rampup_batch_size:
            names = PER_ACCUMULATION_KEYS
        for name in names:
            settings[name] = Fraction(own, accumulation) * getattr(config, name)
    made = replace(config, **settings)
    try:
        found = build_plan(made, plan.num_devices)
    except RampupError:
        return None
    # An evaluation in larger microbatches would be a program that nobody has compiled.
    largest = max(split.microbatch_size for split in found.splits)
    evaluation = found.eval_split
    is_small = evaluation is None or evaluation.microbatch_size <= largest
    return made if is_small and found.ramp.phases == plan.ramp.phases else None


def _times(trials: Sequence[Trial], report: Report) -> dict[int, Times]:
    """Return the times of the trials, by their `id`."""
    if not trials:
        return {}
    sizes = ", ".join(f"{trial.microbatch_size:,}" for trial in trials)
    report(f"timing microbatches of {sizes}")
    states = [trials[0].setup.initial_state()]
    steps = {
        (id(trial), start): trial.step_of(start, states)
        for trial in trials
        for start, _ in trial.timed_splits()
    }
    found: dict[int, dict[int, Timing]] = {id(trial): {} for trial in trials}
    for (trial, start), timing in take_turns(steps).items():
        found[trial][start] = timing
    return dict(found)


def _candidate(trial: Trial, times: Times, usable: int) -> Facts:
    """Return what is known of a configuration, with the times of a step of the last
    phase that was timed.
    """
    row: Facts = {
        "rampup_microbatch": trial.config.rampup_microbatch,
        "microbatch_size": trial.microbatch_size,
        "bytes": finite_or_none(trial.bytes),
        "fits": trial.bytes <= usable,
        "step_seconds": None,
        "spread": None,
        "rounds": None,
        "tokens_per_second": None,
    }
    if times:
        start, timing = max(times.items())
        tokens = trial.splits[start].global_batch_size * trial.config.max_target_length
        row |= timing._asdict()
        row["step_seconds"] = row.pop("seconds")
        row["tokens_per_second"] = tokens / timing.seconds
    return row


def _recommended(
    config: Config, trials: Sequence[Trial], times: Mapping[int, Times]
) -> Facts:
    """Return the facts about the fastest of the trials, of ties that with the fewest
    programs, then the earliest; the first if no time is known.
    """
    seconds = [trial.run_seconds(times.get(id(trial), {})) for trial in trials]
    limit = min(seconds) * (1 + TIE_TOLERANCE)
    tied = [trial for trial, own in zip(trials, seconds, strict=True) if own <= limit]
    chosen = min(tied, key=lambda trial: len(trial.programs))
    rows = [
        {
            "settings": _changes(config, trial.config),
            "executables": len(trial.programs),
            "run_seconds": finite_or_none(own),
        }
        for trial, own in zip(trials, seconds, strict=True)
    ]
    best = rows.pop(trials.index(chosen))
    spread = max(
        (each.spread for own in times.values() for each in own.values()), default=0.0
    )
    notes = []
    if spread > TIE_TOLERANCE:
        notes.append(
            f"the times vary by up to {spread:.0%}, so which settings are faster is not"
            " certain; tune again on a quiet machine"
        )
    return {
        "settings": best["settings"],
        "run_seconds": best["run_seconds"],
        "phases": _phases(chosen, times.get(id(chosen), {})),
        "alternatives": rows,
        "notes": notes,
    }


def _changes(config: Config, made: Config) -> dict[str, Any]:
    """Return the keys that differ, as they are written in a configuration file."""
    before, found = config.to_dict(), {}
    for key, value in made.to_dict().items():
        if value != before[key]:
            found[key] = to_yaml_number(value) if isinstance(value, Fraction) else value
    return found


def _phases(trial: Trial, times: Times) -> list[Facts]:
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
