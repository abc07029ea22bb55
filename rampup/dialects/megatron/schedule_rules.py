"""The rules of Megatron's step schedule of batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rampup.dialects.megatron.job import DECREASE, GLOBAL, MICRO, MegatronFile
from rampup.dialects.megatron.keys import SCHEDULE
from rampup.dialects.megatron.ramp import Threshold, entries_of, parse_entry
from rampup.dialects.nearest import Found, Rule

_RUN: Found = "run"


def _set(file: MegatronFile) -> bool:
    return file[SCHEDULE] is not None


def _unread(file: MegatronFile) -> list[str]:
    return [text for text in entries_of(file[SCHEDULE]) if parse_entry(text, file["seq_length"]) is None]


def _not_rising(file: MegatronFile) -> list[tuple[Threshold, Threshold]]:
    return [(a, b) for a, b in itertools.pairwise(file.thresholds) if b.samples <= a.samples]


def _shrinking(file: MegatronFile) -> list[tuple[Threshold, Threshold]]:
    return [(a, b) for a, b in itertools.pairwise(file.thresholds) if b.size < a.size]


def _without_first_threshold(file: MegatronFile) -> Iterator[str]:
    """The schedule with its first threshold at 0."""
    if file.thresholds and None not in file.entries:
        first, *rest = file.thresholds
        yield " ".join([f"0:{first.size}", *(entry.text for entry in rest)])


def _multiples(file: MegatronFile) -> Iterator[str]:
    """The schedule with each size rounded to the unit, down and then up."""
    if file.schedule_good and file.unit >= 1:
        for extra in (0, file.unit - 1):
            sizes = [max((entry.size + extra) // file.unit * file.unit, file.unit) for entry in file.thresholds]
            pairs = zip(file.thresholds, sizes, strict=True)
            yield " ".join(f"{entry.text.partition(':')[0]}:{size}" for entry, size in pairs)


RULES: tuple[Rule[MegatronFile], ...] = (
    Rule(
        name="megatron.schedule_excludes_global_batch",
        keys=(GLOBAL, SCHEDULE),
        holds=lambda f: not _set(f) or f[GLOBAL] is None,
        message=lambda f: f"{GLOBAL}={f[GLOBAL]} must not be given with {SCHEDULE}, whose last size it would contradict",
    ),
    Rule(
        name="megatron.schedule_excludes_decrease",
        keys=(DECREASE, SCHEDULE),
        holds=lambda f: not _set(f) or not f[DECREASE],
        message=lambda _: f"{DECREASE} must not be given with {SCHEDULE}",
        candidates=lambda _: (False,),
    ),
    Rule(
        name="megatron.schedule_entries",
        keys=(SCHEDULE,),
        holds=lambda f: not _set(f) or (bool(f.entries) and None not in f.entries),
        message=lambda f: (
            f"{SCHEDULE}: {', '.join(repr(text[:40]) for text in _unread(f)[:5]) or 'nothing'} is no THRESHOLD:SIZE; spaces "
            "and commas separate entries (1_000 or 1K, not 1,000), suffixes are K, M, B, T"
        ),
    ),
    Rule(
        name="megatron.schedule_starts_at_0",
        keys=(SCHEDULE,),
        holds=lambda f: not _set(f) or not f.thresholds or f.thresholds[0].samples == 0,
        message=lambda f: f"{SCHEDULE}: the first threshold must be 0, it is {f.thresholds[0].samples:,} samples",
        candidates=_without_first_threshold,
    ),
    Rule(
        name="megatron.schedule_thresholds_increase",
        keys=(SCHEDULE,),
        holds=lambda f: not _set(f) or None in f.entries or not _not_rising(f),
        message=lambda f: (
            f"{SCHEDULE}: thresholds must increase, but {_not_rising(f)[0][0].text} and {_not_rising(f)[0][1].text} are both "
            f"at {_not_rising(f)[0][1].samples:,} samples"
        ),
    ),
    Rule(
        name="megatron.schedule_sizes_positive",
        keys=(SCHEDULE,),
        holds=lambda f: not _set(f) or all(entry.size > 0 for entry in f.thresholds),
        message=lambda f: f"{SCHEDULE}: every size must be at least 1, unlike {min(f.thresholds, key=lambda e: e.size).text}",
    ),
    Rule(
        name="megatron.schedule_grows",
        keys=(SCHEDULE,),
        holds=lambda f: not _set(f) or not f.schedule_good or not _shrinking(f),
        message=lambda f: (
            f"{SCHEDULE}: the batch shrinks from {_shrinking(f)[0][0].size:,} to {_shrinking(f)[0][1].size:,} at "
            f"{_shrinking(f)[0][1].samples:,} samples; the schedule is read, but the trainer stops there"
        ),
        found_by=_RUN,
    ),
    Rule(
        name="megatron.schedule_phases_divisible",
        keys=(SCHEDULE, MICRO),
        holds=lambda f: not _set(f) or not f.schedule_good or f.unit < 1 or f.cut,
        message=lambda f: (
            f"{SCHEDULE}: {', '.join(str(s) for s in f.sizes if s % f.unit)} must be multiples of {MICRO} * data_parallel_size "
            f"= {f.micro} * {f.replicas} = {f.unit}; Megatron checks each batch only when its step comes"
        ),
        candidates=_multiples,
        found_by=_RUN,
    ),
)
