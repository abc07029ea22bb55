"""Tables of a plan that a program looks up by the step that it is in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def look_up(
    starts: Sequence[int], value: Any, columns: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """Return the row of a table that is in force at a traced value: the last one that
    starts at or before it.
    """
    ordered = jnp.asarray(np.array(starts, np.int32))
    index = jnp.searchsorted(ordered, value, side="right") - 1
    return {name: jnp.asarray(column)[index] for name, column in columns.items()}
