"""What is refused of the arguments of a call before they are used: those that are gone,
and those of the wrong type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax.sharding import Mesh

from rampup.engine.contract import SummableLoss
from rampup.errors import ConfigError, a_type
from rampup.plan.plan import RampPlan

F = TypeVar("F", bound=Callable[..., Any])
# What an `AccumulatedLoss` says, and no argument beside the loss.
OPTIONS_OF_LOSS_GONE = {
    "batch_axes": "give rampup.AccumulatedLoss(loss_fn, batch_axes=...) as the loss",
    "whole_batch": "give rampup.AccumulatedLoss(loss_fn, whole_batch=True) as the loss",
}
# What takes the place of `batched` where rows have numbers.
BATCHED_GONE = "rows are numbered; step.stream(source, batched=True) takes batches"


def gone(**replacements: str) -> Callable[[F], F]:
    """Decorate a function or a dataclass that had these keyword arguments: whoever gives
    one is told what replaces it.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            for name in replacements.keys() & options.keys():
                # A class is called by its name.
                raise TypeError(
                    f"{function.__qualname__.removesuffix('.__init__')} has no argument"
                    f" {name!r}; {replacements[name]}"
                )
            return function(*args, **options)

        return cast(F, checked)

    return decorate


def check_arguments(call: str, **arguments: Any) -> None:
    """Refuse arguments of the wrong type, such as two in the wrong order."""
    tests: dict[str, Callable[[Any], bool]] = {
        "loss_fn": lambda x: callable(x) or isinstance(x, SummableLoss),
        "tx": lambda x: hasattr(x, "init") and hasattr(x, "update"),
        "plan": lambda x: isinstance(x, RampPlan),
        "mesh": lambda x: isinstance(x, Mesh),
    }
    for name, value in arguments.items():
        if not tests[name](value):
            raise ConfigError(
                f"{call}: {name} is {a_type(value)}",
                fix="check the order of the arguments: loss_fn is a function, or of a"
                " subclass of rampup.engine.contract.SummableLoss, and tx is an optimizer"
                " of Optax",
                key=name,
            )
