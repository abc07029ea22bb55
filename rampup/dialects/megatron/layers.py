"""How Megatron distributes layers over pipeline stages: evenly, with shorter ends, by a written layout, or by DeepSpeed.

Sources: Megatron-LM `core/transformer/transformer_config.py` (the uneven splits), `pipeline_parallel_layer_layout.py` (the
layout), DeepSpeed `runtime/pipe/module.py` (its partition).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from rampup.dialects import megatron as keys
from rampup.dialects.reading import Settings
from rampup.dialects.verdict import Term

MAX_LAYOUT = 10_000
_NAMES = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
# A group (ab|)*3 and a letter t*3, in the order in which Megatron unrolls them.
_REPEATS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def parse_layout(text: str) -> list[str] | None:
    """Return the letters of each stage of a `--pipeline-model-parallel-layout`, or None if it is malformed or huge.

    Example:
        >>> parse_layout("Et*2|(tt|)*2,L")
        ['Ett', 'tt', 'tt', 'L']
    """
    text = text.replace(",", "").replace(" ", "")
    for pattern in _REPEATS:
        if sum(int(times) * len(part) for part, times in re.findall(pattern, text[:MAX_LAYOUT])) > MAX_LAYOUT:
            return None
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text[:MAX_LAYOUT])
    return text.split("|") if set(text) <= {*_NAMES, "|"} else None


def write_layout(stages: list[object]) -> str:
    """Return the text of a layout that a YAML file gives as a list of lists of names.

    Example:
        >>> write_layout([["embedding", "decoder"], ["decoder", "loss"]])
        'Et|tL'
    """
    letters = {name: letter for letter, name in _NAMES.items()}
    return "|".join(
        "".join(letters.get(str(name).strip().lower(), "?") for name in stage) if isinstance(stage, list) else "?"
        for stage in stages
    )


@dataclass(frozen=True, slots=False, kw_only=True)
class LayerSplit:
    """The layers of a file's pipeline stages.

    Attributes:
        settings: the file.
        stages: pipeline stages.
    """

    settings: Settings
    stages: int

    @property
    def num_layers(self) -> int | None:
        """Decoder layers; None if the file does not say, or names each in a pattern of hybrid layers."""
        hybrid = any(name.startswith("hybrid_") and name.endswith("_pattern") for name in self.settings.others)
        return None if hybrid else self.settings[keys.LAYERS]

    @property
    def by_deepspeed(self) -> bool:
        """True for Megatron-DeepSpeed, which balances any number of layers."""
        return bool(self.settings[keys.PARTITION] or self.settings["deepspeed"])

    @cached_property
    def layout(self) -> list[str] | None:
        """The letters of each stage, or None without a readable layout."""
        return None if self.settings[keys.LAYOUT] is None else parse_layout(self.settings[keys.LAYOUT])

    @property
    def ends(self) -> dict[str, int]:
        """The given numbers of layers of the first and the last stage."""
        return {key: self.settings[key] for key in keys.ENDS if self.settings[key] is not None}

    @property
    def extras(self) -> int:
        """Slots of a layer that the embedding and the loss take."""
        return sum(bool(self.settings[key]) for key in keys.EXTRAS)

    @property
    def is_even(self) -> bool:
        """True if layers are split by division: there are layers, and neither a layout nor DeepSpeed."""
        return self.num_layers is not None and not self.by_deepspeed and self.settings[keys.LAYOUT] is None

    @property
    def middle(self) -> Term:
        """The layers, or slots of layers, that the stages between the given ends share."""
        number = (self.num_layers or 0) + self.extras - sum(self.ends.values())
        if not self.extras and not self.ends:
            return Term(f"num_layers={number}", number)
        parts = [*(f"+ {key}" for key in keys.EXTRAS if self.settings[key]), *(f"- {key}={n}" for key, n in self.ends.items())]
        return Term(f"num_layers={self.num_layers} {' '.join(parts)} = {number}", number)

    @property
    def middle_stages(self) -> Term:
        """The stages between the given ends."""
        number = self.stages - len(self.ends)
        text = f"{keys.STAGES}={self.stages}"
        return Term(f"{text} - {len(self.ends)} = {number}" if self.ends else text, number)

    @property
    def shares(self) -> dict[str, int]:
        """Layers, or slots of layers, of the first, the last and every other stage."""
        stages = self.middle_stages.number
        return self.ends | ({"the layers of a stage": self.middle.number // stages} if stages > 0 else {})

    @property
    def layer_counts(self) -> list[int] | None:
        """Decoder layers of each stage, in their order; None if the file does not say or Megatron refuses it."""
        if self.layout is not None:
            return [sum(stage.count("t") for stage in self.layout[rank :: self.stages]) for rank in range(self.stages)]
        stages, middle = self.middle_stages.number, self.middle.number
        if not self.is_even or stages < 0 or (middle % stages if stages else middle):
            return None
        first, last = (self.settings[key] for key in keys.ENDS)
        counts = [middle // stages if stages else 0] * self.stages
        counts[0] = counts[0] if first is None else first
        counts[-1] = counts[-1] if last is None else last
        counts[0] -= bool(self.settings[keys.EXTRAS[0]])
        counts[-1] -= bool(self.settings[keys.EXTRAS[1]])
        return counts
