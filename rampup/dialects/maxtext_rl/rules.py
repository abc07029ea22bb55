"""The rules of MaxText's reinforcement learning: its own, and those of Tunix, which it is built on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rampup.dialects.maxtext_rl.job import AUTO, ROLLOUT, ROLLOUT_AXES, SLICES, TENSOR, TRAIN, RlFile
from rampup.dialects.nearest import MAX_TRIED, Found, Rule, around

BATCH, GENERATIONS = "batch_size", "rl.num_generations"


def _at_least(key: str, least: int) -> Rule[RlFile]:
    return Rule(
        name=f"maxtext_rl.{key.removeprefix('rl.')}_at_least_{least}",
        keys=(key,),
        holds=lambda f: f[key] >= least,
        message=lambda f: f"{key}={f[key]:,} must be at least {least}",
        candidates=lambda f: range(least, least + MAX_TRIED),
    )


def _share(key: str) -> Rule[RlFile]:
    return Rule(
        name=f"maxtext_rl.{key}",
        keys=(key,),
        holds=lambda f: 0 < f[key] <= 1,
        message=lambda f: f"{key}={f[key]:g} must be above 0 and at most 1",
        candidates=lambda f: (1.0, 0.5, 0.25) if f[key] > 1 else (0.25, 0.5, 1.0),
    )


def _micro_positive(key: str) -> Rule[RlFile]:
    return Rule(
        name=f"maxtext_rl.{key}_positive",
        keys=(key,),
        holds=lambda f: f[key] == AUTO or f[key] > 0,
        message=lambda f: f"{key}={f[key]} (prompts) must be a positive whole number, or -1 for automatic",
        candidates=lambda f: (AUTO, *_divisors(f)),
    )


def _divisors(file: RlFile) -> list[int]:
    """Divisors of the batch, smallest first; of a huge one those that are found soon."""
    batch = max(file.batch, 1)
    small = [n for n in range(1, min(math.isqrt(batch), 10_000) + 1) if batch % n == 0]
    return sorted({*small, *(batch // n for n in small)})


def _divisors_near(key: str) -> Callable[[RlFile], Iterable[int]]:
    return lambda f: sorted(_divisors(f), key=lambda n: abs(n - f[key]))


def _divides(key: str, micro: Callable[[RlFile], int], what: str) -> Rule[RlFile]:
    return Rule(
        name=f"maxtext_rl.{key}_divides_batch",
        keys=(key, BATCH),
        holds=lambda f: f.batch < 1 or micro(f) < 1 or f[key] == AUTO or f.batch % micro(f) == 0,
        message=lambda f: f"{BATCH}={f.batch:,} (prompts) must be a multiple of {key}={f[key]:,} (prompts per {what})",
        candidates=_divisors_near(key),
    )


def _has_a_batch(file: RlFile) -> bool:
    asked = min(file.batch, file["num_batches"], file["num_epoch"]) >= 1 and 0 < file["train_fraction"] <= 1
    return not asked or file.full_batches >= 1


def _rollout_axes(file: RlFile) -> list[int]:
    return [file[axis] for axis in ROLLOUT_AXES]


def _valid_axes(file: RlFile) -> bool:
    return all(size == AUTO or size > 0 for size in _rollout_axes(file)) and _rollout_axes(file).count(AUTO) <= 1


def _axes_fit(file: RlFile) -> bool:
    if file["num_devices"] is None or not _valid_axes(file) or not _slices_agree(file) or not _fractions_hold(file):
        return True
    given, devices = math.prod(size for size in _rollout_axes(file) if size != AUTO), file.sampler_devices
    return devices % given == 0 if AUTO in _rollout_axes(file) else devices == given


def _axes_message(file: RlFile) -> str:
    given = {axis: file[axis] for axis in ROLLOUT_AXES if file[axis] != AUTO}
    rule = "must divide" if AUTO in _rollout_axes(file) else "must be"
    return (
        f"{' * '.join(given)} = {' * '.join(map(str, given.values()))} = {math.prod(given.values())} {rule} the "
        f"{file.sampler_devices} devices that generate"
    )


def _slices_agree(file: RlFile) -> bool:
    trainer, sampler = (file[key] for key in SLICES)
    return bool(trainer == AUTO and sampler == AUTO) or bool(min(trainer, sampler) > 0)


def _fractions_hold(file: RlFile) -> bool:
    return all(0 < file[f"{who}_devices_fraction"] <= 1 for who in ("trainer", "sampler"))


def _tensor_fits(file: RlFile) -> bool:
    if file["num_devices"] is None or not file.multislice or file[TENSOR] <= 1:
        return True
    return _per_slice(file) % int(file[TENSOR]) == 0


def _per_slice(file: RlFile) -> int:
    return file.trainer_devices // int(file[SLICES[0]])


_RUN: Found = "run"


def _someone_works(file: RlFile) -> bool:
    if file["num_devices"] is None or not _slices_agree(file) or not _fractions_hold(file):
        return True
    return min(file.trainer_devices, file.sampler_devices) >= 1


RULES: tuple[Rule[RlFile], ...] = (
    _at_least(BATCH, 1),
    _at_least("num_batches", 1),
    _at_least("num_epoch", 1),
    _at_least("rl.num_iterations", 1),
    _at_least(GENERATIONS, 2),
    _share("train_fraction"),
    _share("trainer_devices_fraction"),
    _share("sampler_devices_fraction"),
    _micro_positive(TRAIN),
    _micro_positive(ROLLOUT),
    _divides(TRAIN, lambda f: f.train_micro, "backward pass"),
    _divides(ROLLOUT, lambda f: int(f[ROLLOUT]), "generate call"),
    Rule(
        name="maxtext_rl.dataset_fills_a_batch",
        keys=(BATCH, "num_prompts", "num_batches", "train_fraction"),
        holds=_has_a_batch,
        message=lambda f: (
            f"{f.prompts:,} prompts * num_epoch={f['num_epoch']} must fill a batch of {BATCH}={f.batch:,} (prompts); the data "
            "set is empty after its last, short batch is dropped"
        ),
        candidates=lambda f: [n for n in around(f.prompts * max(f["num_epoch"], 1)) if n >= 1],
    ),
    Rule(
        name="maxtext_rl.rollout_axes",
        keys=ROLLOUT_AXES,
        holds=_valid_axes,
        message=lambda f: (
            f"{', '.join(f'{axis}={f[axis]}' for axis in ROLLOUT_AXES)}: each must be -1 or above 0, and at most one -1"
        ),
        candidates=lambda f: (1, AUTO),
    ),
    Rule(
        name="maxtext_rl.rollout_devices",
        keys=ROLLOUT_AXES,
        holds=_axes_fit,
        message=_axes_message,
        candidates=lambda f: sorted(range(1, min(f.sampler_devices, 4096) + 1), key=lambda n: abs(n - f[ROLLOUT_AXES[0]])),
    ),
    Rule(
        name="maxtext_rl.slices",
        keys=SLICES,
        holds=_slices_agree,
        message=lambda f: f"{SLICES[0]}={f[SLICES[0]]} and {SLICES[1]}={f[SLICES[1]]} must both be -1 or both be above 0",
        candidates=lambda f: (AUTO, 1),
    ),
    Rule(
        name="maxtext_rl.tensor_in_slice",
        keys=(TENSOR, SLICES[0]),
        holds=_tensor_fits,
        message=lambda f: f"the {_per_slice(f)} training devices of a slice must be a multiple of {TENSOR}={f[TENSOR]}",
        candidates=lambda f: sorted(range(1, min(_per_slice(f), 4096) + 1), key=lambda n: abs(n - f[TENSOR])),
    ),
    Rule(
        name="maxtext_rl.devices_left",
        keys=("trainer_devices_fraction", "sampler_devices_fraction"),
        holds=_someone_works,
        message=lambda f: (
            f"num_devices={f['num_devices']} leave {f.trainer_devices} devices to train and {f.sampler_devices} to generate; "
            "each needs at least 1"
        ),
        candidates=lambda f: (0.5, 1.0),
        found_by=_RUN,
    ),
)
