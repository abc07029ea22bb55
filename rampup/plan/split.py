"""Splits a global batch, B = d * a * m * b, and checks that it can be split.

Each of the d row shards, data * fsdp groups of devices, runs a number `a` of passes, one
after the other; the glossary calls d `data_parallel_size`. A pass is one forward and
one backward of m pipeline microbatches of b samples. Without a pipeline m is 1.
`BatchSplitter` has G, p and v.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, get_args

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampupError,
    choice_error,
    combine,
)
from rampup.plan.nearest import batch_error
from rampup.plan.numbers import AUTO, check_whole, divisors, nearest_multiples
from rampup.plan.pipeline import fastest_microbatches

RampupMicrobatch = Literal["fixed", "per_phase", "auto", "whole"]
RAMPUP_MICROBATCH = get_args(RampupMicrobatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """The factors of one global batch: row shards * accumulation steps * pipeline
    microbatches * microbatch size.

    Other factors than those of the batch raise a BatchDivisibilityError.

    Attributes:
        global_batch_size: samples per optimizer step, B.
        data_parallel_size: row shards, d.
        accumulation_steps: sequential passes per optimizer step, a.
        num_pipeline_microbatches: microbatches in one pipeline pass, m. It is 1 without
            a pipeline.
        microbatch_size: samples per row shard and forward pass, b.

    Example:
        >>> split = BatchSplit(
        ...     global_batch_size=16,
        ...     data_parallel_size=4,
        ...     accumulation_steps=2,
        ...     num_pipeline_microbatches=1,
        ...     microbatch_size=2,
        ... )
        >>> split.num_microbatches
        2
    """

    global_batch_size: int
    data_parallel_size: int
    accumulation_steps: int
    num_pipeline_microbatches: int
    microbatch_size: int

    def __post_init__(self) -> None:
        factors = (
            self.data_parallel_size,
            self.accumulation_steps,
            self.num_pipeline_microbatches,
            self.microbatch_size,
        )
        if min(factors) < 1 or math.prod(factors) != self.global_batch_size:
            product = (
                "data_parallel_size * accumulation_steps * num_pipeline_microbatches *"
                " microbatch_size"
            )
            raise BatchDivisibilityError(
                f"global_batch_size={self.global_batch_size} must be {product} ="
                f" {' * '.join(map(str, factors))}",
                value=self.global_batch_size,
                divisor=max(math.prod(factors), 1),
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one row shard per optimizer step, a * m (Megatron's
        `num_microbatches`).
        """
        return self.accumulation_steps * self.num_pipeline_microbatches

    @property
    def num_rows(self) -> int:
        """Rows of one microbatch, over all row shards, d * b."""
        return self.data_parallel_size * self.microbatch_size


# A compiled program depends on the microbatch size alone. The number of microbatches is
# an argument of the program: its loop runs that many times over buffers with room for
# the maximum, `RampPlan.max_microbatches`.
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplitter:
    """The rule that splits every global batch of a run.

    Attributes:
        data_parallel_size: row shards, d.
        gradient_accumulation_steps: G, MaxText's factor of B. A step has at least G
            passes, unless a pipeline's m is automatic: then `fixed` and `auto` merge
            all passes into one, and G only bounds b.
        num_stages, num_repeats: pipeline stages p, 1 without a pipeline, and layer
            chunks per stage v.
        num_pipeline_microbatches, microbatch_size: m and b; -1 = the splitter chooses
            it.
        rampup_microbatch: the factor that absorbs the growth of B. `fixed`: the number
            of microbatches, so that one compiled shape serves the whole ramp.
            `per_phase`: the microbatch size, with one shape per phase. `auto`: `fixed`
            until the last phase, which has the largest possible microbatch; two shapes.
            `whole`: every batch is one microbatch, for a loss that has to see all its
            rows, with one shape for each batch size. It needs G = 1, p = 1 and an
            automatic b.
        strict_multiple: m must be a multiple of p, as MaxText's pipeline requires.
        min_microbatches: with an automatic b, the microbatches per row shard and step
            to aim for. If no b gives so many, b is 1.
        tick_overhead: fixed cost of a pipeline tick, in samples per row shard. If set,
            an automatic m is the one with the lowest predicted time: in every phase
            with `per_phase`; in the last phase with `fixed`, whose microbatch size then
            serves all phases. If None, m is the smallest legal one.
        unit, smallest: every legal global batch is a multiple of the one and at least
            the other, in samples (derived).

    Example:
        >>> splitter = BatchSplitter(data_parallel_size=4)
        >>> [
        ...     (s.accumulation_steps, s.microbatch_size)
        ...     for s in splitter.split([16, 24, 32, 40, 48])
        ... ]
        [(2, 2), (3, 2), (4, 2), (5, 2), (6, 2)]
    """

    data_parallel_size: int
    gradient_accumulation_steps: int = 1
    num_stages: int = 1
    num_repeats: int = 1
    num_pipeline_microbatches: int = AUTO
    rampup_microbatch: RampupMicrobatch = "fixed"
    microbatch_size: int = AUTO
    strict_multiple: bool = True
    tick_overhead: Fraction | None = None
    min_microbatches: int = 1
    unit: int = field(init=False, repr=False, compare=False)
    smallest: int = field(init=False, repr=False, compare=False)
    _pass_unit: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole(
            data_parallel_size=self.data_parallel_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            num_stages=self.num_stages,
            num_repeats=self.num_repeats,
            num_pipeline_microbatches=self.num_pipeline_microbatches,
            microbatch_size=self.microbatch_size,
        )
        if problems := [*self._problems()]:
            raise combine(problems)
        conditions = [math.prod(factors.values()) for factors in self.conditions]
        object.__setattr__(self, "unit", math.lcm(*conditions))
        # -1, automatic, counts as 1.
        smallest = conditions[0] * max(self.microbatch_size, 1)
        object.__setattr__(self, "smallest", smallest)
        object.__setattr__(self, "_pass_unit", math.prod(self._pass_factors.values()))

    def _problems(self) -> Iterator[RampupError]:
        p = self.num_stages
        m, b = self.num_pipeline_microbatches, self.microbatch_size
        sizes = {
            "data_parallel_size": self.data_parallel_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "num_stages": p,
            "num_pipeline_repeats": self.num_repeats,
        }
        for key, size in sizes.items():
            if size < 1:
                yield ConfigError(
                    f"{key}={size} must be at least 1", key=key, nearest=(1,)
                )
        key = "microbatch_size"
        if b < 1 and b != AUTO:
            yield ConfigError(
                f"{key}={b} must be -1 (automatic) or at least 1",
                key=key,
                nearest=(AUTO, 1),
            )
        if self.rampup_microbatch not in RAMPUP_MICROBATCH:
            yield choice_error(
                "rampup_microbatch", self.rampup_microbatch, RAMPUP_MICROBATCH
            )
        if b != AUTO and self.rampup_microbatch == "per_phase":
            yield ConfigError(
                f"{key}={b} fixes the microbatch size, but rampup_microbatch=per_phase"
                " lets it grow",
                fix="set microbatch_size=-1 or rampup_microbatch=fixed",
                key=key,
                nearest=(AUTO,),
            )
        if self.whole_batch:
            makes = (
                "rampup_microbatch=whole makes every batch one microbatch, so it needs"
            )
            for name, legal in (
                ("gradient_accumulation_steps", 1),
                ("microbatch_size", AUTO),
            ):
                if (size := getattr(self, name)) != legal:
                    yield ConfigError(
                        f"{makes} {name}={legal}, not {size}",
                        fix="set it, or rampup_microbatch=fixed",
                        key=name,
                        nearest=(legal,),
                    )
            if p != 1:
                # Two keys make the stages, and the devices may need them.
                yield ConfigError(
                    f"{makes} one stage (ici_pipeline_parallelism *"
                    f" dcn_pipeline_parallelism), not {p}",
                    fix="set both to 1, or rampup_microbatch=fixed",
                    key="rampup_microbatch",
                )
        if m == AUTO or p < 1:
            return
        key = "num_pipeline_microbatches"
        if m < 1:
            yield PipelineShapeError(
                f"{key}={m} must be -1 (automatic) or at least 1",
                key=key,
                nearest=(AUTO, p),
            )
        elif p == 1 and m > 1:
            yield PipelineShapeError(
                f"{key}={m} needs a pipeline, but ici_pipeline_parallelism *"
                " dcn_pipeline_parallelism = 1",
                fix=(
                    "set it to -1, or split the batch with gradient_accumulation_steps or"
                    " microbatch_size"
                ),
                key=key,
                nearest=(AUTO, 1),
            )
        elif p > 1 and self.strict_multiple and m % p != 0:
            nearest = nearest_multiples(m, p)
            yield PipelineShapeError(
                f"{key}={m} must be a multiple of num_stages = ici_pipeline_parallelism"
                f" * dcn_pipeline_parallelism = {p}; nearest:"
                f" {', '.join(map(str, nearest))}",
                fix="pipeline_strict_multiple=false lifts the multiple",
                key=key,
                nearest=nearest,
            )

    @property
    def whole_batch(self) -> bool:
        """Whether every batch is one microbatch."""
        return self.rampup_microbatch == "whole"

    def for_eval(self) -> BatchSplitter:
        """Return the rule for evaluation: the same rule without the accumulation
        factor.
        """
        return replace(
            self,
            gradient_accumulation_steps=1,
            rampup_microbatch="whole" if self.whole_batch else "fixed",
            tick_overhead=None,
            min_microbatches=1,
        )

    def allows(self, global_batch_size: int) -> bool:
        """Return whether a global batch of this size can be split.

        Args:
            global_batch_size: samples per optimizer step.
        """
        return global_batch_size % self.unit == 0 and global_batch_size >= self.smallest

    def split(self, sizes: Sequence[int]) -> tuple[BatchSplit, ...]:
        """Split all phases' batches, then the sizes reserved for later, or raise an
        error about all that cannot be split.

        Args:
            sizes: global batch sizes in samples, phase by phase.

        Returns:
            A split for each size, in the same order.

        Raises:
            BatchDivisibilityError: the sizes that cannot be split.
        """
        if refused := [
            batch_error(self, size, f"phase {i}")
            for i, size in enumerate(sizes)
            if not self.allows(size)
        ]:
            raise combine(refused)
        largest = [self.largest_microbatch(size) for size in sizes]
        if is_per_phase := self.rampup_microbatch in ("per_phase", "whole"):
            chosen = [
                self._fastest_microbatch([size]) or b
                for size, b in zip(sizes, largest, strict=True)
            ]
        else:
            fixed = self.microbatch_size
            if fixed == AUTO:
                fastest = self._fastest_microbatch(sizes)
                fixed = fastest or self.legal_microbatches(sizes)[-1]
            chosen = [fixed] * len(sizes)
            if self.rampup_microbatch == "auto":
                chosen[-1] = largest[-1]
        return tuple(
            self._make_split(size, b, merge_passes=not is_per_phase)
            for size, b in zip(sizes, chosen, strict=True)
        )

    def _fastest_microbatch(self, sizes: Sequence[int]) -> int | None:
        """Return the microbatch size that divides all batches and has the lowest
        predicted time for the last; None without p > 1, automatic m and b, and
        `tick_overhead`, or if there is none.
        """
        if (
            self.tick_overhead is None
            or self.num_stages == 1
            or self.num_pipeline_microbatches != AUTO
            or self.microbatch_size != AUTO
        ):
            return None
        passes = (
            self.gradient_accumulation_steps
            if self.rampup_microbatch == "per_phase"
            else 1
        )
        # b = samples / m divides all batches if m is a multiple of samples / shared,
        # and is at most the largest legal b of every batch if m is at least samples
        # divided by it.
        samples = sizes[-1] // (self.data_parallel_size * passes)
        shared = math.gcd(*sizes) // (
            self.data_parallel_size * passes * self._pass_unit
        )
        number = fastest_microbatches(
            samples,
            num_stages=self.num_stages,
            overhead=self.tick_overhead,
            num_repeats=self.num_repeats,
            multiple=samples // shared,
            minimum=-(-samples // min(map(self.largest_microbatch, sizes))),
        )
        return None if number is None else samples // number

    def largest_microbatch(self, global_batch_size: int) -> int:
        """Return the largest microbatch size that a legal global batch allows, in
        samples per row shard.

        Args:
            global_batch_size: samples per optimizer step.
        """
        # B = d * m * a * b with m a multiple of `_pass_unit`, so every legal b divides
        # `samples`, and one that serves several batches divides their greatest common
        # divisor; G passes only bound it from above, for each batch. A search over the
        # divisors therefore leaves none out.
        samples = global_batch_size // (self.data_parallel_size * self._pass_unit)
        largest = samples // self.gradient_accumulation_steps
        if (
            self.whole_batch
            or self._pass_unit * self.gradient_accumulation_steps
            >= self.min_microbatches
        ):
            return largest
        return max(
            (
                n
                for n in divisors(samples)
                if n <= largest
                and samples // n * self._pass_unit >= self.min_microbatches
            ),
            default=1,
        )

    def legal_microbatches(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return every microbatch size that divides all of these batches, in ascending
        order.

        Args:
            sizes: global batch sizes, in samples.
        """
        largest = min(map(self.largest_microbatch, sizes))
        common = math.gcd(*sizes) // (self.data_parallel_size * self._pass_unit)
        return tuple(n for n in divisors(common) if n <= largest)

    def _make_split(
        self, size: int, microbatch_size: int, *, merge_passes: bool
    ) -> BatchSplit:
        """Split a batch. With `merge_passes`, an automatic m makes one long pass: its
        bubble is smaller than several.
        """
        num_microbatches = size // (self.data_parallel_size * microbatch_size)
        per_pass = self._pass_unit
        if self.num_stages > 1 and self.num_pipeline_microbatches == AUTO:
            per_pass = num_microbatches // (
                1 if merge_passes else self.gradient_accumulation_steps
            )
        return BatchSplit(
            global_batch_size=size,
            data_parallel_size=self.data_parallel_size,
            accumulation_steps=num_microbatches // per_pass,
            num_pipeline_microbatches=per_pass,
            microbatch_size=microbatch_size,
        )

    @property
    def _pass_factors(self) -> dict[str, int]:
        """The factors of `_pass_unit`, the fewest microbatches in one pass: m, or the
        least that the pipeline allows.
        """
        if self.num_stages == 1:
            return {}
        if self.num_pipeline_microbatches != AUTO:
            return {"num_pipeline_microbatches": self.num_pipeline_microbatches}
        return {"num_stages": self.num_stages}

    @property
    def conditions(self) -> list[dict[str, int]]:
        """The products, by name, that every global batch must be a multiple of."""
        shards = {"data_parallel_size": self.data_parallel_size}
        conditions = [
            shards
            | {"gradient_accumulation_steps": self.gradient_accumulation_steps}
            | self._pass_factors
        ]
        if self.microbatch_size != AUTO:
            conditions.append(
                shards | {"microbatch_size": self.microbatch_size} | self._pass_factors
            )
        return conditions


# The rule of one row shard, which splits every batch.
ANY_BATCH = BatchSplitter(data_parallel_size=1)
