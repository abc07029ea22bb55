"""The batch size that follows the measured gradient noise scale: `batch_size_schedule:
auto`.

All rules are known before step 0. The sizes are the first batch times powers of two,
and the largest batch, each checked like a phase of any other ramp. The batch never
shrinks, and a decision at most doubles it. It grows to a size B only if the lower end N
of the noise scale's interval is so large that at most a share `max_waste` of a sample
is lost, B / (N + B): by default 20%, at 4 B. So an estimate that is not certain changes
nothing. After a change, a half-life of samples must pass, so that the estimate has
mostly seen the new batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rampup.plan.describe import format_count
from rampup.plan.noise_scale import NoiseEstimate
from rampup.plan.ramp import BatchRamp

DECISION_PERIOD = 10  # steps between two decisions


@dataclass(slots=True, kw_only=True)
class AutoSchedule:
    """The decisions of a run about its batch. It is the same in all processes, and part
    of every checkpoint.
    """

    sizes: tuple[int, ...]  # the legal sizes, from `auto_sizes`
    half_life_samples: float  # samples that must pass between two changes
    rows: list[list[int]]  # start step, start sample and size of every phase so far
    max_waste: float = 0.2  # share of a sample that a batch may lose to grow

    @property
    def size(self) -> int:
        """The size that is in use."""
        return self.rows[-1][2]

    @property
    def schedule(self) -> str:
        """The decisions so far as a `batch_size_schedule` in samples."""
        return " ".join(f"{sample}:{size}" for _, sample, size in self.rows)

    @property
    def ramp(self) -> BatchRamp:
        """The decisions so far as a ramp."""
        return BatchRamp.from_rows(self.rows)

    def needed_noise(self, size: int) -> float:
        """Return the noise scale at which a batch loses `max_waste` of its samples."""
        return size * (1 - self.max_waste) / self.max_waste

    def is_due(self, step: int) -> bool:
        """Return whether there is a decision after this many steps."""
        return step > 0 and step % DECISION_PERIOD == 0

    def decide(self, *, step: int, sample: int, noise_scale: float | None) -> int:
        """Decide after these steps and samples, by the lower end of the noise scale;
        return the size from there on.
        """
        if noise_scale is None or sample - self.rows[-1][1] < self.half_life_samples:
            return self.size
        reached = [
            size
            for size in self.sizes
            if size <= 2 * self.size and self.needed_noise(size) <= noise_scale
        ]
        if reached and reached[-1] > self.size:
            self.rows.append([step, sample, reached[-1]])
        return self.size

    def outlook(self, *, step: int, sample: int, noise: NoiseEstimate) -> str:
        """Return in words why `decide` changed the batch after a step, or what the next
        larger batch needs.
        """
        if len(self.rows) > 1 and self.rows[-1][0] == step:
            return (
                f"{self.rows[-2][2]:,} -> {self.size:,} samples, because the"
                f" noise scale is {noise}"
            )
        wasted = self._broken_limit(noise)
        larger = next((size for size in self.sizes if size > self.size), None)
        if larger is None:
            return (
                f"{self.size:,} samples, the largest batch; the noise scale is"
                f" {noise}{wasted}"
            )
        needs, needed = [], self.needed_noise(larger)
        if noise.low is None or noise.low < needed:
            needs.append(
                f"a noise scale whose interval begins at {needed:,.6g} or above, it is"
                f" {noise}"
            )
        if (
            missing := math.ceil(self.rows[-1][1] + self.half_life_samples - sample)
        ) > 0:
            needs.append(format_count(missing, "more sample"))
        more = ", and ".join(needs)
        return f"{format_count(self.size, 'sample')}; {larger:,} need {more}{wasted}"

    def _broken_limit(self, noise: NoiseEstimate) -> str:
        """Return a sentence if the noise scale is so small that the batch in use loses
        more than `max_waste`, whatever its value in the interval: it began too large,
        or the noise has fallen. The batch does not shrink.
        """
        if noise.high is None or noise.high >= self.needed_noise(self.size):
            return ""
        waste = self.size / (noise.high + self.size)
        return (
            f". The noise scale is too small: {self.size:,} lose at least {waste:.0%} of"
            f" their samples, more than {self.max_waste:.0%}, and the batch does not"
            " shrink; a new run with a smaller one would not"
        )
