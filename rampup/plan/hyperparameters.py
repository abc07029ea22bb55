"""AdamW's constants for a batch of another size: published rules that keep the
optimizer's behavior per token.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Literal, get_args

from rampup.errors import ConfigError, RampupError, choice_error, raise_together
from rampup.plan.describe import format_count
from rampup.plan.learning_rate import BatchScaling
from rampup.plan.numbers import check_range
from rampup.plan.plan import RampPlan

DecayScaling = Literal["none", "half_life", "sde"]
EpsScaling = Literal["none", "sde"]
WeightDecayScaling = Literal["none", "timescale", "power_lines"]
# The best B / (learning rate * weight decay * D) falls with the tokens per parameter,
# to this power (Bergsma et al. 2025).
TIMESCALE_EXPONENT = -0.527
# The largest decay rate below 1 that a device can tell from 1, in float32.
MAX_DECAY_RATE = 1 - 2**-24


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamConstants:
    """The constants of AdamW."""

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        check_range(0, 1, b1=self.b1, b2=self.b2)
        check_range(0, eps=self.eps, weight_decay=self.weight_decay)

    @property
    def c1(self) -> float:
        """1 - b1, not yet rounded to the type of a device."""
        return 1 - self.b1

    @property
    def c2(self) -> float:
        """1 - b2, not yet rounded to the type of a device."""
        return 1 - self.b2


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamScaling:
    """How AdamW's constants depend on the batch.

    Attributes:
        b1, b2: `none`; `half_life`, b**ratio, so that the average spans the same number
            of tokens (Marek et al. 2025, arXiv 2507.07101); or `sde`, 1 - ratio * (1 -
            b), with which batches of different sizes approximate the same stochastic
            differential equation (Malladi et al. 2022, arXiv 2205.10287).
        b2_floor, b2_ceiling: limits of the scaled b2; None = no limit.
        eps: `none`, or `sde`, eps / sqrt(ratio) (Malladi et al. 2022).
        weight_decay: `none`; `timescale`, which keeps B / (learning rate * weight decay
            * D) constant, where D is the number of tokens of the run (Wang & Aitchison
            2024, arXiv 2405.13698); or `power_lines`, which lets it fall as D**-0.527
            for the same model (Bergsma et al. 2025, arXiv 2505.13738). They differ only
            in runs of another length.
        token_ratio: D divided by that of the run for which the weight decay was chosen.

    Example:
        >>> scaling = AdamScaling(b2="half_life", weight_decay="timescale")
        >>> scaling.constants(
        ...     AdamConstants(b2=0.9, weight_decay=0.1), ratio=0.5, rate_scale=1.0
        ... )
        AdamConstants(b1=0.9, b2=0.9486832980505138, eps=1e-08, weight_decay=0.05)
    """

    b1: DecayScaling = "none"
    b2: DecayScaling = "none"
    b2_floor: float | None = None
    b2_ceiling: float | None = None
    eps: EpsScaling = "none"
    weight_decay: WeightDecayScaling = "none"
    token_ratio: float = 1.0

    def __post_init__(self) -> None:
        check_range(0, token_ratio=self.token_ratio)
        for name in ("b2_floor", "b2_ceiling"):
            if (limit := getattr(self, name)) is not None:
                check_range(0, 1, **{name: limit})
        kinds = {
            "b1": DecayScaling,
            "b2": DecayScaling,
            "eps": EpsScaling,
            "weight_decay": WeightDecayScaling,
        }
        raise_together(
            [
                choice_error(f"AdamScaling.{name}", value, get_args(kind))
                for name, kind in kinds.items()
                if (value := getattr(self, name)) not in get_args(kind)
            ]
        )

    @property
    def is_active(self) -> bool:
        """Whether any constant depends on the batch."""
        return (self.b1, self.b2, self.eps, self.weight_decay) != ("none",) * 4

    def constants(
        self, base: AdamConstants, *, ratio: float, rate_scale: float, where: str = ""
    ) -> AdamConstants:
        """Return the constants for a batch, `ratio` times the reference batch, whose
        constants are `base`.

        The batch puts the factor `rate_scale` on the learning rate; `where` names its
        phase in errors.

        Raises:
            ConfigError: a decay rate falls below 0, or rounds to 1 on a device, and no
                floor or ceiling prevents it.
        """
        rates = {}
        of_b1 = (base.b1, self.b1, None, None)
        of_b2 = (base.b2, self.b2, self.b2_floor, self.b2_ceiling)
        for name, (b, rule, floor, ceiling) in {"b1": of_b1, "b2": of_b2}.items():
            if rule == "none":
                rates[name] = b
                continue
            scaled = b**ratio if rule == "half_life" else 1 - ratio * (1 - b)
            rates[name] = min(
                max(scaled, -1 if floor is None else floor),
                1 if ceiling is None else ceiling,
            )
            if not 0 <= rates[name] <= MAX_DECAY_RATE:
                formula = (
                    f"{b:g} ** {ratio:g}"
                    if rule == "half_life"
                    else f"1 - {ratio:g} * (1 - {b:g})"
                )
                problem, fix = (
                    ("below 0", "adam_b2_floor")
                    if scaled < 0
                    else ("1 in float32", "AdamScaling(b2_ceiling=...)")
                )
                fixes = [f"set {fix}"] * (name == "b2") + ["use the rule half_life"] * (
                    rule == "sde"
                )
                raise ConfigError(
                    f"the rule {rule} gives adam_{name} = {formula} = {scaled:.9g} for"
                    f" {where or 'this batch'}, which is {problem};"
                    f" {', or '.join(fixes) or 'use larger batches'}",
                    key="batch_scaling",
                    nearest=("half_life",) if rule == "sde" else (),
                )
        # The timescale B / (learning rate * weight decay * D), relative to that of the
        # reference.
        timescale = (
            self.token_ratio**TIMESCALE_EXPONENT
            if self.weight_decay == "power_lines"
            else 1.0
        )
        factor = (
            1.0
            if self.weight_decay == "none"
            else ratio / rate_scale / self.token_ratio / timescale
        )
        eps = base.eps / ratio**0.5 if self.eps == "sde" else base.eps
        return AdamConstants(**rates, eps=eps, weight_decay=base.weight_decay * factor)


# The published rules of the key `batch_scaling`: each scales the learning rate, and
# some of AdamW's constants. `sqrt` is `sde` for the learning rate alone, `half_life`
# has the largest adam_b2 of marin, `timescale` the learning rate of nanochat, and
# `complete` has the weight decay that goes with `sde` (Mlodozeniec et al. 2025, arXiv
# 2512.22382).
BATCH_RULES: dict[str, tuple[BatchScaling, AdamScaling]] = {
    "none": ("none", AdamScaling()),
    "linear": ("linear", AdamScaling()),
    "sqrt": ("sqrt", AdamScaling()),
    "sde": ("sqrt", AdamScaling(b1="sde", b2="sde", eps="sde")),
    "half_life": ("none", AdamScaling(b2="half_life", b2_ceiling=0.9999)),
    "timescale": ("sqrt", AdamScaling(weight_decay="timescale")),
    "power_lines": ("sqrt", AdamScaling(weight_decay="power_lines")),
    "complete": (
        "sqrt",
        AdamScaling(b1="sde", b2="sde", eps="sde", weight_decay="timescale"),
    ),
}


def warmup_steps(plan: RampPlan, fraction: float) -> int:
    """Return the optimizer steps of a warm-up, whose length on the clock of samples
    depends on the batches.

    Args:
        plan: the plan, with the clock of the learning rate's schedule.
        fraction: the share of the schedule that the warm-up takes.

    Returns:
        The first steps that have less than the peak of the rate.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.constant(64),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=50,
        ... )
        >>> warmup_steps(plan, 0.1)
        5
    """
    # The first segment whose end the warm-up does not pass, and the step in it.
    ends = [segment.progress for segment in plan.clock]
    segment = plan.clock[max(bisect.bisect_left(ends, fraction) - 1, 0)]
    left = (fraction - segment.progress) / segment.progress_per_step
    return segment.start_step + max(math.ceil(left - 1e-9), 0)


def warmup_fraction(
    plan: RampPlan, steps: int, *, decay_fraction: float = 0.0
) -> float:
    """Return the share of the schedule that a warm-up of so many steps takes: the
    inverse of `warmup_steps`.

    Args:
        plan: the plan, with the clock of the learning rate's schedule.
        steps: the optimizer steps of the warm-up.
        decay_fraction: the share of the schedule that its decay takes at its end.

    Returns:
        The progress of the schedule before optimizer step `steps`.

    Raises:
        ConfigError: the warm-up ends after the decay begins.

    Example:
        >>> from rampup.plan import BatchRamp, BatchSplitter
        >>> from rampup.plan.learning_rate import RateRule
        >>> plan = RampPlan(
        ...     ramp=BatchRamp.from_schedule("0:8 80:16"),
        ...     splitter=BatchSplitter(data_parallel_size=1),
        ...     num_devices=1,
        ...     total_steps=20,
        ...     rate=RateRule(clock="samples"),
        ... )
        >>> warmup_fraction(plan, 10)  # 80 of 240 samples
        0.3333333333333333
    """

    def progress(step: int) -> float:
        return plan.segment_at(step).progress_at(step)

    longest = bisect.bisect_right(
        range(plan.schedule_steps + 1), 1 - decay_fraction + 1e-9, key=progress
    )
    if steps > longest - 1:
        raise ConfigError(
            f"warmup_steps={steps} must be at most {longest - 1:,}, the steps of the"
            " schedule before its decay",
            key="warmup_steps",
            nearest=(longest - 1,),
        )
    return progress(steps)


def moment_lag_steps(growth: float, b2: float) -> float:
    """Return the steps that a growth of the batch costs while Adam's second moment
    follows: 2 ln((1 + sqrt(k)) / 2) / (1 - b2).

    Derivation: where the noise of the gradient dominates, the second moment v is
    proportional to 1 / batch. At a growth by k it is k times its new value and decays
    to it, v(t) / v = 1 + (k - 1) exp(-(1 - b2) t). A step is proportional to 1 /
    sqrt(v), so it is too small, and the steps lost are the integral over t of 1 - 1 /
    sqrt(1 + (k - 1) exp(-(1 - b2) t)). With u = exp(-(1 - b2) t), its antiderivative is
    2 ln(1 + sqrt(1 + (k - 1) u)) / (1 - b2), between u = 0 and 1.

    Args:
        growth: k, the new batch divided by the one before.
        b2: decay rate of the second moment after the growth.

    Returns:
        Optimizer steps; 0 for a batch that does not grow.

    Example:
        >>> round(moment_lag_steps(8, 0.99))
        130
    """
    if growth <= 1:
        return 0.0
    return 2 * math.log((1 + math.sqrt(growth)) / 2) / (1 - b2)


def adam_constants(
    plan: RampPlan, base: AdamConstants, scaling: AdamScaling
) -> tuple[AdamConstants, ...]:
    """Return the constants of every segment of a plan's clock, or raise the errors of
    all segments at once.
    """
    found, problems = [], dict[str, RampupError]()
    for segment in plan.clock:
        ratio = segment.global_batch_size / plan.reference_size
        where = f"a global batch of {format_count(segment.global_batch_size, 'sample')}"
        try:
            found.append(
                scaling.constants(
                    base, ratio=ratio, rate_scale=segment.scale, where=where
                )
            )
        except ConfigError as error:
            # With Seesaw, several segments have the same batch.
            problems[str(error)] = error
    raise_together([*problems.values()])
    return tuple(found)
