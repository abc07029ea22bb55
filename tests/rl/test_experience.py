"""Tests of rampup.rl.experience."""

import numpy as np
import pytest

from rampup.errors import ConfigError
from rampup.rl.experience import BYTES, Experience


def test_bytes_are_those_of_numpy():
    """Every type's size is NumPy's; bfloat16, which NumPy lacks, has two bytes."""
    for name, size in BYTES.items():
        assert size == (2 if name == "bfloat16" else np.dtype(name).itemsize)


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_memory_is_that_of_the_arrays(critic, reference):
    """The bytes are those of arrays of these shapes and types, added up."""
    experience = Experience(max_prompt_length=7, max_response_length=5, reference=reference, value_dtype="float16")
    arrays = {"tokens": np.zeros(12, np.int32), "attention_mask": np.zeros(12, bool), "response_mask": np.zeros(5, bool)}
    names = ["log_probabilities", "rewards", "advantages"]
    names += ["reference_log_probabilities"] if reference else []
    names += ["values", "returns"] if critic else []
    arrays |= {name: np.zeros(5, np.float16) for name in names}
    assert {field.name: field.bytes_per_sample for field in experience.fields(critic=critic)} == {
        name: array.nbytes for name, array in arrays.items()
    }
    assert experience.bytes_per_sample(critic=critic) == sum(array.nbytes for array in arrays.values())


def test_everything_wrong_is_said_at_once():
    """Lengths and types are checked together."""
    with pytest.raises(ConfigError) as caught:
        Experience(max_prompt_length=0, max_response_length=-1, token_dtype="int33", value_dtype="")
    assert [problem.key for problem in caught.value.problems] == [
        "max_prompt_length",
        "max_response_length",
        "token_dtype",
        "value_dtype",
    ]
