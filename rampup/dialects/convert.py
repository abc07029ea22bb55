"""Another system's run as rampup's own: YAML for pre-training, a `RolloutPlan` for reinforcement learning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rampup.config.files import yaml_value
from rampup.config.schema import KEYS
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Verdict
from rampup.errors import ConfigError
from rampup.plan.numbers import to_yaml_number
from rampup.rl.plan import RolloutPlan
from rampup.rl.sizes import Size, Unit
from rampup.rl.updates import Training

_NAMES = {"maxtext": "MaxText", "megatron": "Megatron"}
_MAX_NAME = 100


def to_rampup(verdict: Verdict) -> str:
    """Return rampup's configuration of the run that a verdict is about.

    Args:
        verdict: of a MaxText or Megatron file.

    Returns:
        YAML text, from which `rampup.load_config` and `build_plan` make the verdict's plan. Keys that it does not set have
        rampup's defaults. A comment names each key of the file that has no counterpart.

    Raises:
        ConfigError: rampup's configuration has no counterpart of the system, or its plan refuses the run.

    Example:
        >>> from rampup.dialects.verdict import Conversion
        >>> conversion = Conversion(values={"steps": 10}, left_out={"a": "no counterpart"})
        >>> print(to_rampup(Verdict(system="maxtext", conversion=conversion)))
        # Converted from a MaxText file: its batches, its ramp and its pipeline.
        <BLANKLINE>
        steps: 10
        <BLANKLINE>
        # Left out:
        # a: no counterpart
        <BLANKLINE>
    """
    conversion = verdict.conversion
    if conversion is None:
        raise ConfigError(
            f"a {verdict.system} file cannot be converted: rampup's configuration is for pre-training; write its sizes in "
            "the keys of configs/rl.yml",
            key="to",
        )
    if conversion.refusal is not None:
        raise ConfigError(f"the file cannot be converted: {conversion.refusal}", key="to")
    name = _NAMES.get(verdict.system, verdict.system)
    lines = [f"# Converted from a {name} file: its batches, its ramp and its pipeline.", ""]
    for key, value in conversion.values.items():
        lines.append(f"{key}: {yaml_value(to_yaml_number(value) if isinstance(value, Fraction) else value)}")
    if conversion.left_out:
        lines += ["", "# Left out:"]
    for key, reason in conversion.left_out.items():
        # A key may contain anything; it must stay within its comment.
        printable = "".join(letter if letter.isprintable() else "?" for letter in key)
        lines.append(f"# {printable[:_MAX_NAME]}: {reason}")
    return "\n".join(lines) + "\n"


def left_out(settings: Settings, expressed: Collection[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a file that a conversion does not express, each with the reason.

    Args:
        settings: the file.
        expressed: the keys that are converted.
        reasons: keys with a reason of their own.
    """
    result = dict(reasons)
    for key in sorted((settings.given - set(expressed) - set(reasons)) | settings.others):
        result[key] = "not converted; rampup has a key of this name" if key in KEYS else "no counterpart"
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The sizes with which a step's samples train one model.

    Attributes:
        name: `policy`, `actor` or `critic`.
        mini_batch: size of an optimizer step, whole job, in the unit of the system.
        mini_samples: the same in samples.
        replicas: data-parallel size.
        micro: samples of a pass and replica; None if unknown.
        tokens: token budget of a pass and replica, which replaces `micro`; None without one.
        epochs: passes over a step's samples.
    """

    name: str
    mini_batch: int
    mini_samples: int
    replicas: int
    micro: int | None
    tokens: int | None = None
    epochs: int

    @property
    def share(self) -> int:
        """Samples of an update and replica, rounded down."""
        return self.mini_samples // self.replicas

    @property
    def padded_share(self) -> int:
        """Samples of an update and replica, rounded up."""
        return -(-self.mini_samples // self.replicas)

    @property
    def padding(self) -> int:
        """Empty samples that fill a mini batch up to a multiple of the replicas."""
        return -self.mini_samples % self.replicas

    def training(self, unit: Unit) -> Training:
        """Return the same in the words of a `RolloutPlan`."""
        microbatch = None
        if self.tokens is not None:
            microbatch = Size(count=self.tokens, unit="tokens", scope="replica")
        elif self.micro is not None:
            microbatch = Size(count=self.micro, unit="samples", scope="replica")
        return Training(
            mini_batch=Size(count=self.mini_batch, unit=unit),
            microbatch=microbatch,
            data_parallel_size=self.replicas,
            num_epochs=self.epochs,
        )


def rollout_plan(
    count: int, unit: Unit, models: Sequence[TrainedModel], *, samples_per_prompt: int, pad: bool = False
) -> RolloutPlan:
    """Return the plan of a step of `count` prompts or samples that trains the policy and, if there is one, the critic.

    Example:
        >>> policy = TrainedModel(name="policy", mini_batch=64, mini_samples=256, micro=4, replicas=8, epochs=1)
        >>> rollout_plan(256, "prompts", [policy], samples_per_prompt=4).policy_updates.accumulation_steps
        8
    """
    policy, *critics = [model.training(unit) for model in models]
    return RolloutPlan(
        rollout_batch=Size(count=count, unit=unit),
        samples_per_prompt=samples_per_prompt,
        policy=policy,
        critic=critics[0] if critics else None,
        pad=pad,
    )
