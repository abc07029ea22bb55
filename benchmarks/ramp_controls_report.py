"""Every number of "Does a ramp pay?", from benchmarks/ramp_controls.jsonl.

    python benchmarks/ramp_controls_report.py          # phrases and tables
    python benchmarks/ramp_controls_report.py cosine   # the tables of one shape

It needs the standard library alone. The page has the tables and the phrases as they are
printed, and no other number of the study (`tests/benchmarks/test_ramp_controls.py`). The
tables of pilots are printed only.
"""

from __future__ import annotations

import math
import operator
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ramp_controls_results import (
    B2,
    CONFIDENCE,
    DESIGNED_FOR,
    LEAST_SAVED,
    LENGTH,
    MACHINES,
    RAMPS,
    SAMPLES,
    SEEDS,
    SHAPES,
    TENTHS,
    VARIANTS,
    WARMUP_STEPS,
    WSD_DECAY,
    Study,
    above_same_rates,
    above_tuned,
    control_sizes,
    excludes_zero,
    expected,
    fastest,
    half_life_b2,
    hours_saved,
    interval,
    losses_of,
    lost_by,
    moved_by_steps,
    over_ramps,
    pays,
    penalties,
    places,
    rates_grow_to,
    read,
)

IN_WORDS = {"wsd": "under WSD", "cosine": "with a cosine"}


def constant_table(study: Study) -> list[str]:
    """Return a table of the constant batches whose fresh seeds have run."""
    lines = ["| Batch | Steps | b2 | Best rate | Loss |", "|---|---|---|---|---|"]
    keys = sorted({key[:2] for key in study.constants}, key=lambda k: (k[0], -k[1]))
    for size, b2 in keys:
        best = study.best(size, b2)
        if best is None:
            continue
        rate, losses = best
        error = statistics.stdev(losses.values()) / len(losses) ** 0.5
        lines.append(
            f"| {size} | {study.steps[f'0:{size}']:,} | {b2:g} | {rate:.1e} |"
            f" {statistics.mean(losses.values()):.3f} ± {error:.3f} |"
        )
    return lines


def at_equal_steps(study: Study) -> list[str]:
    """Return a table of what ramps end above constant batches of as many steps."""
    lines = [
        "| Rates of the ramp | Above the constant batch at its best rate |"
        " Above the constant batch with the same rates |",
        "|---|---|---|",
    ]
    for variant, words in VARIANTS.items():
        tuned = [above_tuned(study, each, variant) for each in study.schedules]
        cells = [signed(interval(over_ramps(tuned))), ""]
        if variant == "rule":  # only it has a constant batch with its own rates
            same = [above_same_rates(study, each) for each in study.schedules]
            cells[1] = signed(interval(over_ramps(same)))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def against(study: Study) -> dict[str, list[tuple[float, float, float]]]:
    """Return the hours that ramps save with the square-root rule, compared with fewer
    constant batches, by machine.
    """
    choices: dict[str, Callable[[int, float], bool]] = {
        f"the best batch, b2 of {B2}": lambda size, b2: b2 == B2,
        f"64, b2 of {B2}": lambda size, b2: (size, b2) == (64, B2),
        "64, b2 by the half-life": lambda size, b2: size == 64 and b2 != B2,
    }
    return {
        words: [hours_saved(study, machine, among=among) for machine in MACHINES]
        for words, among in choices.items()
    }


def against_table(study: Study) -> list[str]:
    """Return a table of `against`."""
    heads = " | ".join(f"1 + B/{machine}" for machine in MACHINES)
    lines = [f"| Compared with | {heads} |", "|---" * 4 + "|"]
    for words, cells in against(study).items():
        lines.append(f"| {words} | {' | '.join(map(percent, cells))} |")
    return lines


def pilot_table(study: Study) -> list[str]:
    """Return a table of what each pilot predicted, and what the whole runs showed, as
    losses above the smallest batch.
    """
    lines = [
        "| Pilot | Noise scale | Candidate | Predicted | Measured | Inside |",
        "|---|---|---|---|---|---|",
    ]
    for each in penalties(study):
        inside = "yes" if each.is_inside else "no"
        ends = f"({each.low:+.2f}, {each.high:+.2f})"
        lines.append(
            f"| {each.pilot.replace(' rate', ',')} | {each.noise:.0f} |"
            f" {each.schedule} | {each.predicted:+.2f} {ends} | {each.measured:+.2f} |"
            f" {inside} |"
        )
    return lines


def verdict(study: Study) -> list[str]:
    """Return what the ramps save, by machine; after the last ramp, what the rule of the
    study says of it.
    """
    count, lines = len(study.schedules), []
    for machine in MACHINES:
        saved = hours_saved(study, machine)
        found = percent(saved)
        if count == 1:
            says = f"this ramp saves {found}"
        elif count < RAMPS:
            says = f"these ramps save {found}"
        elif pays(saved):
            says = f"these ramps pay: {found}"
        else:
            says = f"these ramps are not shown to pay: {found}"
        lines.append(f"- Where a step takes 1 + B/{machine}, {says}.")
    return lines


def signed(found: tuple[float, float, float]) -> str:
    """Return a difference of losses with its interval."""
    middle, low, high = found
    return f"{middle:+z.3f} ({low:+z.3f}, {high:+z.3f})"


def percent(found: tuple[float, float, float]) -> str:
    """Return a share with its interval."""
    middle, low, high = found
    return f"{middle:+.1%} ({low:+.1%}, {high:+.1%})"


def tables(study: Study) -> dict[str, list[str]]:
    """Return the tables of a shape that the page has by their titles; those of ramps if
    all have run.
    """
    found = {"Constant batches": constant_table(study)}
    if study.schedules:
        found["At equal steps"] = at_equal_steps(study)
        found["Fewer batches"] = against_table(study)
        found["Verdict"] = verdict(study)
    return found


def by_shape(
    studies: Mapping[str, Study], of: Callable[[Study], str], *, joint: str = " and "
) -> str:
    """Return a number of each shape in words."""
    return joint.join(
        f"{of(study)} {IN_WORDS[shape]}" for shape, study in studies.items()
    )


def plain(found: tuple[float, float, float]) -> str:
    """Return a difference of losses with its interval, for a sentence."""
    middle, low, high = found
    return f"{middle:z.3f} ({low:z.3f} to {high:z.3f})"


def spread(values: Iterable[float], form: str) -> str:
    """Return the least and the largest of some numbers."""
    ordered = sorted(values)
    return f"{ordered[0]:{form}} to {ordered[-1]:{form}}"


def phrases(
    rows: Sequence[dict[str, Any]], studies: Mapping[str, Study]
) -> dict[str, str]:
    """Return the numbers in the sentences of the page, as they stand there, by what they
    are.
    """
    return (
        phrases_of_runs(rows, studies)
        | phrases_of_ramps(studies)
        | phrases_of_hours(studies)
        | phrases_beside_constants(studies)
        | phrases_of_constants(studies)
        | phrases_of_pilots(studies)
    )


def phrases_of_runs(
    rows: Sequence[dict[str, Any]], studies: Mapping[str, Study]
) -> dict[str, str]:
    """Return what was run."""
    parameters = next(row["parameters"] for row in rows if row["name"] == "study")
    runs = [row for row in rows if "loss" in row]
    pilots = [row for row in rows if "candidates" in row]
    sizes = [size for study in studies.values() for size in study.sizes]
    whole = [
        (study.steps[schedule], study.steps[f"0:{study.same_size[schedule]}"])
        for study in studies.values()
        for schedule in study.schedules
    ]
    return {
        "runs": f"{len(runs)} runs and {len(pilots)} pilots",
        "parameters": f"{parameters:,} parameters",
        "samples": f"{SAMPLES:,} samples of {LENGTH} bytes",
        "bytes": f"{SAMPLES * LENGTH / parameters:.1f} bytes per parameter",
        "warm-up": f"{WARMUP_STEPS} steps, or a third of a shorter run",
        "decay": f"the last {WSD_DECAY:.0%}",
        "constant batches": f"{min(sizes)} to {max(sizes)} samples",
        "a plain b2": f"`adam_b2` of {B2}",
        "the first batch": f"a batch of {min(sizes)}",
        "steps of ramps": f"{spread((ramp for ramp, _ in whole), 'd')} steps",
        "steps of controls": f"up to {max(abs(a - b) for a, b in whole)} steps",
        "machines": ", ".join(f"1 + B/{machine}" for machine in MACHINES[:-1])
        + f" or 1 + B/{MACHINES[-1]}",
        "the machine of the designs": f"1 + B/{DESIGNED_FOR}",
        "rule": f"more than {LEAST_SAVED:.0%} of the hours",
        "intervals": f"{CONFIDENCE:.0%} interval",
    }


def phrases_of_ramps(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return what ramps end above their controls, and above each other."""

    def above(study: Study, variant: str) -> tuple[float, float, float]:
        by_ramp = [above_tuned(study, each, variant) for each in study.schedules]
        return interval(over_ramps(by_ramp))

    def same(study: Study) -> tuple[float, float, float]:
        by_ramp = [above_same_rates(study, each) for each in study.schedules]
        return interval(over_ramps(by_ramp))

    def own_rates(study: Study) -> tuple[float, float, float]:
        """What the constant batches end above themselves with the rates of the ramps."""
        tuned = over_ramps([above_tuned(study, e, "rule") for e in study.schedules])
        same = over_ramps([above_same_rates(study, e) for e in study.schedules])
        return interval(map(operator.sub, tuned, same))

    def less(study: Study, variant: str) -> tuple[float, float, float]:
        """What a variant ends above the rule, of the same ramps."""
        by_ramp = [
            {
                seed: study.ramps[each, variant][seed] - study.ramps[each, "rule"][seed]
                for seed in SEEDS
            }
            for each in study.schedules
        ]
        return interval(over_ramps(by_ramp))

    singles = [
        interval(each.values())
        for study in studies.values()
        for schedule in study.schedules
        for each in (
            above_tuned(study, schedule, "rule"),
            above_same_rates(study, schedule),
        )
    ]
    clear = sum(map(excludes_zero, singles))
    return {
        "above constant batches at their best rates": by_shape(
            studies, lambda study: plain(above(study, "rule"))
        ),
        "above constant batches with the same rates": by_shape(
            studies, lambda study: plain(same(study))
        ),
        "constant batches with both rates": by_shape(
            studies, lambda study: plain(own_rates(study))
        ),
        "single ramps": spread((each[0] for each in singles), "+.3f"),
        "clear single ramps": f"{clear} of the {len(singles)} intervals",
        "change by interpolated steps": f"by less than {moved_by_steps(studies):.3f}",
        "left alone": by_shape(studies, lambda study: plain(less(study, "none"))),
        "peak": by_shape(studies, lambda study: plain(less(study, "surge"))),
        "second moment": by_shape(
            studies, lambda study: plain(less(study, "rule, moment divided"))
        ),
    }


def phrases_of_hours(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return what ramps save of the hours, and what designs expected."""

    def in_words(study: Study) -> str:
        middle, low, high = hours_saved(study, DESIGNED_FOR)
        return f"{middle:.1%} ({low:.1%} to {high:.1%})"

    def at_most(study: Study) -> str:
        return f"{math.ceil(hours_saved(study, DESIGNED_FOR)[2] * 100)}%"

    single = [
        pays(interval(study.saved(schedule, variant, machine).values()))
        for study in studies.values()
        for schedule in study.schedules
        for variant in ("rule", "rule, moment divided")
        for machine in MACHINES
    ]
    moved, same_verdict = [], True
    for study in studies.values():
        for machine in MACHINES:
            own = hours_saved(study, machine)
            other = hours_saved(study, machine, slope=study.earlier_slope)
            moved.append(abs(own[0] - other[0]) * 100)
            same_verdict &= pays(own) == pays(other)
    return {
        "hours saved": by_shape(studies, in_words),
        "not excluded": by_shape(studies, at_most),
        "expected": by_shape(
            studies, lambda study: spread(expected(study), ".1%"), joint=", and "
        ),
        "expected on average": by_shape(
            studies, lambda study: f"{statistics.mean(expected(study)):.1%}"
        ),
        "single ramps that pay": f"Of {len(single)} intervals of single ramps, {sum(single)} "
        + ("passes" if sum(single) == 1 else "pass"),
        "slope": by_shape(studies, lambda study: f"{study.slope:.3f}"),
        "earlier slope": by_shape(studies, lambda study: f"{study.earlier_slope:.3f}"),
        "moved by that slope": f"by {spread(moved, '.1f')} points, and"
        + (" no verdict" if same_verdict else " a verdict"),
    }


def phrases_beside_constants(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return which constant batches the hours of ramps differ from, and what a constant
    batch for another machine costs.
    """
    best = {
        machine: {fastest(study, machine) for study in studies.values()}
        for machine in MACHINES
    }

    def best_on(machine: int) -> str:
        """The one batch that is the best under both shapes."""
        ((size, b2),) = best[machine]
        rule = f"of {B2}" if b2 == B2 else "by the half-life"
        return f"{size} with b2 {rule} on 1 + B/{machine}"

    def is_peer(size: int, b2: float) -> bool:
        return {(size, b2)} == best[DESIGNED_FOR]

    def is_64_by_half_life(size: int, b2: float) -> bool:
        return (size, b2) == (64, half_life_b2(64))

    shown = any(
        excludes_zero(hours_saved(study, DESIGNED_FOR, among=among))
        for study in studies.values()
        for among in (is_peer, is_64_by_half_life)
    )
    cells = [
        (words.split(",")[0], low, high)
        for study in studies.values()
        for words, row in against(study).items()
        for _, low, high in row
    ]
    above = [size for size, low, _ in cells if low > 0]
    below = sum(high < 0 for _, _, high in cells)
    sizes = sorted(
        {size for study in studies.values() for size in control_sizes(study)}
    )
    lost = {
        machine: [
            share
            for study in studies.values()
            for share in lost_by(study, machine, sizes)
        ]
        for machine in MACHINES
        if machine != DESIGNED_FOR
    }
    return {
        "beside constant batches": f"{'a' if shown else 'no'} difference is shown between"
        f" the ramps and a batch of {next(iter(best[DESIGNED_FOR]))[0]}, or one of 64"
        " with `adam_b2` by the half-life",
        "best batches": ", ".join(map(best_on, MACHINES[:-1]))
        + f" and {best_on(MACHINES[-1])}",
        "against fewer": f"{len(above)} of {len(cells)} are above zero, all against"
        f" {' or '.join(sorted(set(above)))}, and {below} below",
        "wrong machines": f"With b2 of {B2} for all, constant batches of"
        f" {' and '.join(map(str, sizes))} lose "
        + " and ".join(
            f"{spread(shares, '.0%')} on 1 + B/{machine}"
            for machine, shares in lost.items()
        ),
    }


def phrases_of_constants(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return what constant batches show."""

    def by_half_life(study: Study, size: int) -> tuple[float, float, float]:
        """What the half-life of the smallest batch takes off the loss."""
        own, other = study.best(size), study.best(size, half_life_b2(size))
        assert own is not None
        assert other is not None
        # Each at its best rate, which differs only where the page says so.
        assert (own[0] == other[0]) == (size != max(study.sizes))
        return interval(own[1][seed] - other[1][seed] for seed in SEEDS)

    def samples_of(study: Study, size: int) -> float:
        """How many times the samples of the smallest batch a batch needs."""
        ends = [
            statistics.mean(losses_of(study, f"0:{each}"))
            for each in (size, study.sizes[0])
        ]
        return math.exp((ends[0] - ends[1]) / study.slope)

    shown = any(excludes_zero(by_half_life(study, 128)) for study in studies.values())
    told = "a difference can" if shown else "no difference can"
    gaps = []
    for study in studies.values():
        sweeps: dict[tuple[int, float], list[float]] = {}
        for (size, b2, _), losses in study.constants.items():
            sweeps.setdefault((size, b2), []).append(losses[0])
        gaps += [sorted(each)[1] - min(each) for each in sweeps.values()]
    near = sum(gap < 0.01 for gap in gaps)
    return {
        "samples of 64": f"with b2 of {B2}, 64 needs "
        + by_shape(studies, lambda study: f"{samples_of(study, 64):.1f} times"),
        "b2 of 64": "64 ends "
        + by_shape(studies, lambda study: plain(by_half_life(study, 64))),
        "b2 of 32": "32 ends "
        + by_shape(studies, lambda study: plain(by_half_life(study, 32))),
        "b2 of 128": f"At 128, {told} be told",
        "close rates": f"In {near} of {len(gaps)} sweeps, the second rate is within 0.01",
        "rates that grow": f"Up to {min(map(rates_grow_to, studies.values()))}, no best"
        " rate is lower",
    }


def phrases_of_pilots(studies: Mapping[str, Study]) -> dict[str, str]:
    """Return how the predictions of pilots did."""
    found = [each for study in studies.values() for each in penalties(study)]
    inside = sum(each.is_inside for each in found)
    constant = sum(" " not in each.schedule for each in found)

    def off(kind: Callable[[str], bool]) -> str:
        errors = [e.predicted - e.measured for e in found if kind(e.schedule)]
        return spread(errors, "+.2f")

    ends = [
        place
        for study in studies.values()
        for place in places(study)
        if place.tenth == TENTHS
    ]
    missed = [place for place in ends if not place.is_inside]
    (pilot,) = {(place.shape, place.pilot) for place in missed}
    return {
        "noise scales": f"{spread((each.noise for each in found), '.0f')} samples",
        "inside": f"{inside} of {len(found)} intervals",
        "constant batches predicted": f"{constant} of them are of constant batches",
        "width": f"a factor of {spread((e.high / e.low for e in found), '.1f')}",
        "off at 64": f"{off(lambda schedule: schedule == '0:64')} for 64",
        "off at 128": f"{off(lambda schedule: schedule == '0:128')} for 128",
        "off for ramps": f"{off(lambda schedule: ' ' in schedule)} for the ramps",
        "losses at the end": "the end: "
        f"{len(ends) - len(missed)} of {len(ends)} ({1 - len(missed) / len(ends):.0%})",
        "where they miss": f"The other {len(missed)} are all of the pilot with"
        f" {pilot[1].split(' x')[1]} times the best rate {IN_WORDS[pilot[0]]}",
    }


def main() -> None:
    """Print the phrases and the tables."""
    rows = read()
    studies = {shape: Study(rows, shape) for shape in sys.argv[1:] or SHAPES}
    if len(studies) == len(SHAPES):
        print("# Phrases\n")
        for name, phrase in phrases(rows, studies).items():
            print(f"{name}: {phrase}")
        print()
    for shape, study in studies.items():
        print(f"# {shape}\n")
        if not study.constants:
            print("not run\n")
            continue
        for title, lines in tables(study).items():
            print(f"## {title}\n", *lines, "", sep="\n")
        if study.schedules:
            print("## Pilots\n", *pilot_table(study), "", sep="\n")
            print(f"Ramps: {', '.join(study.schedules)}\n")


if __name__ == "__main__":
    main()
