"""How a global batch is cut: B = d * a * m * b. The one home of every divisibility rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    PipelineShapeError,
    RampupError,
    raise_together,
)
from rampup.plan.numbers import divisors, nearest_multiples
from rampup.plan.pipeline_cost import PipelineChoice, pipeline_choices

AUTO = -1
RampupMicrobatch = Literal["fixed", "per_phase", "auto"]
RAMPUP_MICROBATCH: tuple[RampupMicrobatch, ...] = ("fixed", "per_phase", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """One global batch, cut: global = data parallel * accumulation * pipeline microbatches * microbatch.

    Attributes:
        global_batch_size: samples per optimizer step, B.
        data_parallel_size: replicas, d.
        accumulation_steps: sequential passes per optimizer step, a.
        num_pipeline_microbatches: microbatches in one pipeline pass, m; 1 without a pipeline.
        microbatch_size: samples per replica and forward pass, b.
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
            raise BatchDivisibilityError(
                f"global_batch_size={self.global_batch_size} must be data_parallel_size * accumulation_steps * "
                f"num_pipeline_microbatches * microbatch_size = {' * '.join(map(str, factors))}",
                value=self.global_batch_size,
                divisor=max(math.prod(factors), 1),
            )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one replica per optimizer step, a * m (Megatron's `num_microbatches`)."""
        return self.accumulation_steps * self.num_pipeline_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplitter:
    """The rule by which every global batch of a run is cut.

    Attributes:
        data_parallel_size: replicas, d.
        gradient_accumulation_steps: G, the factor of B in MaxText's configuration; the least number of passes.
        num_stages: pipeline stages p; 1 = no pipeline.
        num_repeats: layer chunks per stage v.
        num_pipeline_microbatches: m, or -1 for automatic.
        rampup_microbatch: what absorbs the growth of B. `fixed`: the number of passes, so that one shape serves the
            whole ramp; `per_phase`: the microbatch, one shape a phase; `auto`: `fixed` until the last phase and the
            largest allowed microbatch in it, two shapes.
        microbatch_size: b, or -1 for automatic.
        strict_multiple: m must be a multiple of p (the rule of MaxText's pipeline).
        delay_activation_forwarding: m must be at least 2p (MaxText).
        tick_overhead: what a pipeline tick costs beside its arithmetic, in samples per replica (`chooser.predicted_time`).
            With it an automatic m is the one with the lowest predicted time: `per_phase` in every phase, `fixed` in the last
            one, whose microbatch then serves all. Without it m is the smallest, the microbatch the largest.

    Example:
        >>> splitter = BatchSplitter(data_parallel_size=4)
        >>> [(s.accumulation_steps, s.microbatch_size) for s in splitter.split([16, 24, 32, 40, 48])]
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
    delay_activation_forwarding: bool = False
    tick_overhead: Fraction | None = None

    def __post_init__(self) -> None:
        raise_together([*self._size_problems(), *self._microbatch_problems()])

    def for_eval(self) -> BatchSplitter:
        """Return the rule for evaluation: the same without the accumulation factor."""
        return replace(self, gradient_accumulation_steps=1, rampup_microbatch="fixed", tick_overhead=None)

    @property
    def unit(self) -> int:
        """What every global batch must be a multiple of, in samples."""
        return math.lcm(*(math.prod(factors.values()) for factors in self._conditions()))

    @property
    def unit_rule(self) -> str:
        """The same in words: the products of keys that make up `unit`."""
        conditions = self._conditions()
        last = math.prod(conditions[-1].values())
        needed = [c for c in conditions if c is conditions[-1] or last % math.prod(c.values())]
        return " and of ".join(product_text(factors) for factors in needed)

    @property
    def smallest(self) -> int:
        """The smallest legal global batch, in samples."""
        per_pass = self.data_parallel_size * self.gradient_accumulation_steps * self._pass_unit
        return per_pass * max(self.microbatch_size, 1) if self._fixes_microbatch else per_pass

    def nearest(self, global_batch_size: int) -> tuple[int, ...]:
        """Return the legal global batch sizes next to the given one, below and above.

        Example:
            >>> BatchSplitter(data_parallel_size=8, microbatch_size=4).nearest(50)
            (32, 64)
        """
        legal = [size for size in nearest_multiples(global_batch_size, self.unit) if size >= self.smallest]
        return tuple(legal) or (self.smallest,)

    def allows(self, global_batch_size: int) -> bool:
        """Say whether a global batch of this size can be cut."""
        return global_batch_size % self.unit == 0 and global_batch_size >= self.smallest

    def problem(self, global_batch_size: int, where: str, *, key: str | None = None) -> RampupError | None:
        """Return what is wrong with a global batch size, with the nearest legal ones, or None.

        Args:
            global_batch_size: samples per optimizer step.
            where: the place in the plan, for the message.
            key: the configuration key to blame.
        """
        if self.allows(global_batch_size):
            return None
        rules = f"a multiple of {self.unit_rule}"
        if global_batch_size % self.unit == 0:
            rules = f"at least {self.smallest}, so that accumulation_steps >= gradient_accumulation_steps"
        nearest = self.nearest(global_batch_size)
        return BatchDivisibilityError(
            f"global_batch_size={global_batch_size} ({where}) must be {rules}; nearest: {', '.join(map(str, nearest))}",
            value=global_batch_size,
            divisor=self.unit,
            key=key,
            nearest=nearest,
        )

    def split(self, sizes: Sequence[int]) -> tuple[BatchSplit, ...]:
        """Cut the global batches of all phases of one run.

        Args:
            sizes: global batch size of every phase, in samples.

        Raises:
            BatchDivisibilityError: sizes that cannot be cut; all of them at once.
        """
        raise_together([p for i, size in enumerate(sizes) if (p := self.problem(size, f"phase {i}"))])
        largest = [self.largest_microbatch(size) for size in sizes]
        if self.rampup_microbatch == "per_phase":
            chosen = [
                choices[0].microbatch_size if (choices := self.choices([size])) else b
                for size, b in zip(sizes, largest, strict=True)
            ]
            return tuple(self._cut(size, b, merge_passes=False) for size, b in zip(sizes, chosen, strict=True))
        if self._fixes_microbatch:
            fixed = self.microbatch_size
        else:
            fixed = choices[0].microbatch_size if (choices := self.choices(sizes)) else math.gcd(*largest)
        chosen = [fixed] * len(sizes)
        if self.rampup_microbatch == "auto":
            chosen[-1] = largest[-1]
        return tuple(self._cut(size, b, merge_passes=True) for size, b in zip(sizes, chosen, strict=True))

    def split_with(self, global_batch_size: int, microbatch_size: int) -> BatchSplit | None:
        """Return the same batch in microbatches of another size, in more passes, or None if it cannot be cut so.

        Example:
            >>> BatchSplitter(data_parallel_size=2).split_with(48, 8).accumulation_steps
            3
        """
        replicas = self.data_parallel_size * self._pass_unit
        if global_batch_size % (replicas * microbatch_size):
            return None
        return self._cut(global_batch_size, microbatch_size, merge_passes=True)

    def choices(self, sizes: Sequence[int]) -> tuple[PipelineChoice, ...]:
        """Return the ways to cut the last of these batches that suit all of them, the fastest first.

        Empty where there is nothing to choose: no pipeline, m or b given, or no `tick_overhead`.
        """
        if not self._chooses or self.tick_overhead is None:
            return ()
        shared = math.gcd(*(self.largest_microbatch(size) for size in sizes))
        passes = self.gradient_accumulation_steps if self.rampup_microbatch == "per_phase" else 1
        samples = sizes[-1] // (self.data_parallel_size * passes)
        return pipeline_choices(
            samples,
            num_stages=self.num_stages,
            overhead=self.tick_overhead,
            repeats=(self.num_repeats,),
            multiple=samples // shared,
            least=self._pass_unit,
        )

    def largest_microbatch(self, global_batch_size: int) -> int:
        """Return the largest microbatch that a legal global batch allows, in samples per replica.

        Example:
            >>> BatchSplitter(data_parallel_size=4, gradient_accumulation_steps=2).largest_microbatch(96)
            12
        """
        return global_batch_size // (self.data_parallel_size * self.gradient_accumulation_steps * self._pass_unit)

    def legal_microbatches(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return every microbatch size that cuts all of these batches, smallest first.

        Example:
            >>> BatchSplitter(data_parallel_size=4).legal_microbatches([16, 32, 48])
            (1, 2, 4)
        """
        common = math.gcd(*(size // (self.data_parallel_size * self._pass_unit) for size in sizes))
        largest = min(self.largest_microbatch(size) for size in sizes)
        return tuple(n for n in divisors(common) if n <= largest)

    def _cut(self, size: int, microbatch_size: int, *, merge_passes: bool) -> BatchSplit:
        """Cut one batch; with `merge_passes` an automatic m takes all microbatches into one pipeline pass."""
        num_microbatches = size // (self.data_parallel_size * microbatch_size)
        in_a_pass = self._pass_unit
        if self.num_stages > 1 and self.num_pipeline_microbatches == AUTO:
            in_a_pass = num_microbatches // (1 if merge_passes else self.gradient_accumulation_steps)
        return BatchSplit(
            global_batch_size=size,
            data_parallel_size=self.data_parallel_size,
            accumulation_steps=num_microbatches // in_a_pass,
            num_pipeline_microbatches=in_a_pass,
            microbatch_size=microbatch_size,
        )

    @property
    def _chooses(self) -> bool:
        return self.num_stages > 1 and self.num_pipeline_microbatches == AUTO and not self._fixes_microbatch

    @property
    def _fixes_microbatch(self) -> bool:
        return self.microbatch_size != AUTO

    @property
    def _pass_unit(self) -> int:
        """Microbatches that one pass consists of at least: m, or the least m that the pipeline's rules allow."""
        if self.num_stages == 1:
            return 1
        if self.num_pipeline_microbatches != AUTO:
            return self.num_pipeline_microbatches
        return self.num_stages * (2 if self.delay_activation_forwarding else 1)

    @property
    def _pass_factors(self) -> dict[str, int]:
        if self.num_stages == 1:
            return {}
        if self.num_pipeline_microbatches != AUTO:
            return {"num_pipeline_microbatches": self.num_pipeline_microbatches}
        return {"num_stages": self.num_stages} | ({"delayed forwarding": 2} if self.delay_activation_forwarding else {})

    def _conditions(self) -> list[dict[str, int]]:
        """The products, by name, of which every global batch must be a multiple."""
        replicas = {"data_parallel_size": self.data_parallel_size}
        conditions = [replicas | {"gradient_accumulation_steps": self.gradient_accumulation_steps} | self._pass_factors]
        if self._fixes_microbatch:
            conditions.append(replicas | {"microbatch_size": self.microbatch_size} | self._pass_factors)
        return conditions

    def _size_problems(self) -> list[RampupError]:
        sizes = {
            "data_parallel_size": self.data_parallel_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "num_stages": self.num_stages,
            "num_pipeline_repeats": self.num_repeats,
        }
        problems: list[RampupError] = [
            ConfigError(f"{key}={size} must be at least 1", key=key, nearest=(1,)) for key, size in sizes.items() if size < 1
        ]
        if self.microbatch_size < 1 and self.microbatch_size != AUTO:
            problems.append(
                ConfigError(
                    f"microbatch_size={self.microbatch_size} must be -1 (automatic) or at least 1",
                    key="microbatch_size",
                    nearest=(AUTO, 1),
                )
            )
        if self.rampup_microbatch not in RAMPUP_MICROBATCH:
            problems.append(
                ConfigError(
                    f"rampup_microbatch={self.rampup_microbatch!r} must be one of {', '.join(RAMPUP_MICROBATCH)}",
                    key="rampup_microbatch",
                    nearest=RAMPUP_MICROBATCH,
                )
            )
        if self._fixes_microbatch and self.rampup_microbatch == "per_phase":
            problems.append(
                ConfigError(
                    f"microbatch_size={self.microbatch_size} fixes the microbatch, but rampup_microbatch=per_phase lets it "
                    "grow; set microbatch_size=-1 or rampup_microbatch=fixed",
                    key="microbatch_size",
                    nearest=(AUTO,),
                )
            )
        return problems

    def _microbatch_problems(self) -> list[RampupError]:
        m, p = self.num_pipeline_microbatches, self.num_stages
        if m == AUTO or p < 1:
            return []
        key = "num_pipeline_microbatches"
        if m < 1:
            return [PipelineShapeError(f"{key}={m} must be -1 (automatic) or at least 1", key=key, nearest=(AUTO, p))]
        if p == 1:
            if m == 1:
                return []
            return [
                PipelineShapeError(
                    f"{key}={m} needs a pipeline, but ici_pipeline_parallelism * dcn_pipeline_parallelism = 1; set it to -1, "
                    "or cut the batch with gradient_accumulation_steps or microbatch_size",
                    key=key,
                    nearest=(AUTO, 1),
                )
            ]
        least = 2 * p if self.delay_activation_forwarding else p
        strict = self.strict_multiple and m % p != 0
        late = self.delay_activation_forwarding and m < least
        if not strict and not late:
            return []
        rule = f"a multiple of num_stages = ici_pipeline_parallelism * dcn_pipeline_parallelism = {p}" if strict else ""
        rule += " and " if strict and late else ""
        rule += f"at least 2 * num_stages = {least} (pipeline_delay_activation_forwarding)" if late else ""
        nearest = [n for n in nearest_multiples(m, p) if n >= least] or [least]
        hint = "; pipeline_strict_multiple=false lifts the multiple" if strict else ""
        return [
            PipelineShapeError(
                f"{key}={m} must be {rule}; nearest: {', '.join(map(str, nearest))}{hint}", key=key, nearest=nearest
            )
        ]


def product_text(factors: Mapping[str, int]) -> str:
    """Write a product with its names and its values.

    Example:
        >>> product_text({"data_parallel_size": 64, "microbatch_size": 8})
        'data_parallel_size * microbatch_size = 64 * 8 = 512'
    """
    used = {name: size for name, size in factors.items() if size != 1} or factors
    names, values = " * ".join(used), " * ".join(map(str, used.values()))
    return f"{names} = {values}" + (f" = {math.prod(used.values())}" if len(used) > 1 else "")
