"""What the chooser's pick of a number of pipeline microbatches costs, against the measured best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rampup.plan.pipeline import PipelineCandidate, pipeline_candidates
from rampup.plan.timetable import num_ticks

Cut = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooserCheck:
    """Measured step times of all ways to cut a batch, and what the chooser says without having seen them.

    Attributes:
        num_stages: p.
        samples: samples B of the batch.
        seconds: measured step time by (m, v).
        default_overhead: h where nobody has measured it, in samples.
    """

    num_stages: int
    samples: int
    seconds: Mapping[Cut, float]
    default_overhead: Fraction

    @property
    def fitted_overhead(self) -> Fraction | None:
        """The h of t = ticks * c * (b + h) that fits the times with v = 1 best, by least squares of relative errors.

        None if none of zero or more does: a tick whose cost grows more than in proportion to b, or falls.

        Example:
            >>> seconds = {(1, 1): 4.0 * (16 + 3), (16, 1): 19.0 * (1 + 3)}
            >>> ChooserCheck(num_stages=4, samples=16, seconds=seconds, default_overhead=Fraction(8)).fitted_overhead
            Fraction(3, 1)
        """
        sizes = {
            Fraction(self.samples, m): Fraction(self.seconds[m, v]) / num_ticks(self.num_stages, m)
            for m, v in self.seconds
            if v == 1
        }
        points = [(b, per_tick, 1 / per_tick**2) for b, per_tick in sizes.items()]
        total = sum(weight for _, _, weight in points)
        mean_b = sum(b * weight for b, _, weight in points) / total
        mean_tick = sum(per_tick * weight for _, per_tick, weight in points) / total
        slope = sum((b - mean_b) * per_tick * weight for b, per_tick, weight in points)
        slope /= sum((b - mean_b) ** 2 * weight for b, _, weight in points)
        overhead = mean_tick / slope - mean_b if slope > 0 else Fraction(-1)
        return overhead if overhead >= 0 else None

    @property
    def overheads(self) -> dict[str, Fraction]:
        """The values of h to choose with, by name; fitted first, if there is one."""
        fitted = self.fitted_overhead
        return ({} if fitted is None else {"fitted h": fitted}) | {"default h": self.default_overhead}

    def ranking(self, overhead: Fraction) -> list[PipelineCandidate]:
        """Return the measured ways to cut the batch in the chooser's order, the fastest first.

        Args:
            overhead: h, in samples.
        """
        repeats = sorted({v for _, v in self.seconds})
        choices = pipeline_candidates(self.samples, num_stages=self.num_stages, overhead=overhead, repeats=repeats)
        return [choice for choice in choices if cut_of(choice) in self.seconds]

    def regret(self, cut: Cut) -> float:
        """Return a measured time over the best one."""
        return self.seconds[cut] / min(self.seconds.values())

    def columns(self, cut: Cut) -> dict[str, object]:
        """Return what the table says of one (m, v).

        Args:
            cut: m and v.
        """
        ranking = [cut_of(choice) for choice in self.ranking(next(iter(self.overheads.values())))]
        return {"predicted_rank": ranking.index(cut) + 1, "regret": self.regret(cut)}

    def notes(self) -> list[str]:
        """Return what the chooser picked with each h, and what that costs."""
        notes = []
        best = min(self.seconds, key=lambda cut: self.seconds[cut])
        for name, overhead in self.overheads.items():
            m, v = chosen = cut_of(self.ranking(overhead)[0])
            notes.append(
                f"Chooser at p={self.num_stages}, B={self.samples}: with the {name} of {float(overhead):.3g} samples it picks "
                f"m={m}, v={v}; measured best m={best[0]}, v={best[1]}; regret (chosen / best) {self.regret(chosen):.3f}."
            )
        if self.fitted_overhead is None:
            notes.append("The measured times give no h: the time of a tick is far from linear in the microbatch, or too noisy.")
        return notes


def cut_of(choice: PipelineCandidate) -> Cut:
    """Return (m, v)."""
    return choice.num_microbatches, choice.num_repeats
