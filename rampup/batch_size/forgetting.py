"""A second model of a schedule, for a learning rate that stays constant: training forgets the noise of its gradients.

The model of `rampup.batch_size.design_model` has no memory: what the noise of a step costs is lost for good, so a batch is best
where it pays at once. While the learning rate is constant, that is not what is seen. Loss curves of different batches cross
(Zhou et al. 2026, arXiv 2601.05034), and after a switch to a large batch the loss soon is that of a run that had it from the
start, because noise is forgotten (Wang et al. 2026, arXiv 2602.14208, whose functional scaling law is that of Li et al. 2025,
arXiv 2509.19189). So large batches early buy nothing that lasts.

Here, as there, the loss is a signal plus a noise. The signal falls with the learning rate times the steps. The noise relaxes to
a level in proportion to the learning rate over the batch. Two choices are ours. Noise fades exponentially; the papers have a
power law. And its size follows from a batch b for which the rate was tuned: at the best constant rate, a slightly higher one
would add as much noise as it lowers the signal, so the noise of b is the decrease of the loss per factor e of the progress P.

A step of the batch b makes a progress of b / (1 + b/N), N the noise scale (McCandlish et al. 2018, arXiv 1812.06162). With a
rate that is scaled by (B/b)^r, and is not above that of a noiseless step, a sample in a batch B makes

    g(B) = min((B/b)^r b / (1 + b/N), N) / B    of progress, and its noise fades to    g(B)/g(b) |dL/dlnP|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rampup.batch_size.design_model import DATA_EXPONENTS, DesignModel, Schedule, late_switches, loss_penalty

# Parts of a schedule in which progress and noise are integrated.
PARTS = 1000
# A schedule that has not reached a loss after this many lengths of the run is taken never to reach it.
MOST_LENGTHS = 3


class Point(NamedTuple):
    """Where a schedule is."""

    samples: float
    progress: float  # samples that a very small batch would need for the signal
    noise: float  # what the noise adds to the loss


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgettingModel:
    """The model.

    Example:
        >>> from rampup.batch_size.design_model import NoiseCurve, StepTimes
        >>> times = StepTimes.fit({1: 1.0, 64: 64.0})
        >>> model = DesignModel(noise=NoiseCurve(knots=((1.0, 1e9),), growth=0.0), times=times)
        >>> forgetting = ForgettingModel(model=model, batch=16, power=0.5, memory=100.0, slope=0.2, length=10_000)
        >>> [round(forgetting.gain(size, 1.0), 2) for size in (1, 16, 64)]  # the learning rate grows by the square root
        [4.0, 1.0, 0.5]
        >>> forgetting.late_switch([1, 64])
        ((0, 1), (9000, 64))
    """

    model: DesignModel  # the noise scale and the seconds
    batch: int  # b, for which the learning rate was tuned
    power: float  # r, of the rule by which the learning rate follows the batch
    memory: float  # the progress in which noise falls by a factor e
    slope: float  # decrease of the loss per factor e of the progress, at the last measurement
    length: int  # samples of the run

    def gain(self, size: int, progress: float) -> float:
        """Return the progress that a sample makes in a batch, there."""
        noise = self.model.noise.at(progress)
        step = math.pow(size / self.batch, self.power) * self.batch / (1 + self.batch / noise)
        return min(step, noise) / size

    def follow(self, schedule: Schedule, loss: float = -math.inf) -> Point:
        """Return where a schedule is after the samples of the run, or where it reaches a loss, which may be later."""
        here = Point(0.0, 0.0, math.nan)
        part = self.length / PARTS
        last = self.model.noise.knots[-1][0]
        while here.samples < self.length * (1 if loss == -math.inf else MOST_LENGTHS) - part / 2:
            size = next(size for start, size in reversed(schedule) if start <= here.samples + part / 2)
            gain = self.gain(size, here.progress)
            progress = here.progress + gain * part
            fall = self.slope * (max(progress, last) / last) ** -DATA_EXPONENTS[0]
            level = gain / self.gain(self.batch, here.progress) * fall
            before = level if here.samples == 0 else here.noise
            here = Point(here.samples + part, progress, level + (before - level) * math.exp(-gain * part / self.memory))
            if self.loss(here) <= loss:
                return here
        return here if loss == -math.inf else here._replace(samples=math.inf)

    def loss(self, point: Point) -> float:
        """Return the loss, less that of the signal at the last measurement."""
        last = self.model.noise.knots[-1][0]
        return loss_penalty(point.progress, last, slope=self.slope, measured_at=last) + point.noise

    def seconds(self, schedule: Schedule, loss: float) -> float:
        """Return the seconds until a schedule has a loss; infinite if it has not after three times the samples of the run."""
        samples = self.follow(schedule, loss).samples
        return self.model.times.total(schedule, samples) if samples < math.inf else math.inf

    def late_switch(self, sizes: Sequence[int]) -> Schedule:
        """Return the schedule with one switch from the smallest batch, in the second half, whose loss is the lowest."""
        return min(late_switches(sizes, self.length), key=lambda schedule: self.loss(self.follow(schedule)))
