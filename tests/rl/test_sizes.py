"""Tests of rampup.rl.sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rampup.errors import BatchDivisibilityError, ConfigError, RampupError
from rampup.plan.numbers import MAX_SAMPLES
from rampup.rl.sizes import BYTES, Experience, Size, data_parallel_size


@pytest.mark.parametrize(
    ("unit", "scope", "samples"),
    [
        ("prompts", "job", 15),
        ("samples", "job", 3),
        ("prompts", "replica", 60),
        ("samples", "replica", 12),
        ("samples", "process", 12),
    ],
)
def test_samples_of_every_unit_and_scope(unit, scope, samples):
    """Prompts count their responses, and sizes per replica or process count all replicas."""
    assert Size(count=3, unit=unit, scope=scope).samples(samples_per_prompt=5, data_parallel_size=4) == samples


def test_size_as_text():
    """The text has count, unit and scope."""
    assert str(Size(count=1, unit="prompts")) == "1 prompt"
    assert str(Size(count=2, unit="samples", scope="process")) == "2 samples per process"


@pytest.mark.parametrize("count", [0, -1, MAX_SAMPLES + 1, True, 1.5, "3", None])
def test_size_rejects_bad_counts(count):
    """A count is a whole number from 1 to 10**9, and the error has the configuration key."""
    with pytest.raises(ConfigError) as caught:
        Size(count=count, unit="prompts", key="batch_size")
    assert caught.value.key == "batch_size"
    assert "batch_size=" in str(caught.value)


def test_size_reports_all_problems():
    """All problems of a size are in one error."""
    with pytest.raises(ConfigError) as caught:
        Size(count=0, unit="tonnes", scope="world")
    assert len(caught.value.problems) == 3


def test_data_parallel_size_of_verls_70b_case():
    """32 nodes of 8 devices with TP 8, PP 2 and SP 8: 16 replicas in Megatron, whose SP uses the TP devices; 32 in FSDP.

    Multiplying all three, as one might read the file, would give 2.
    """
    world = 32 * 8
    assert data_parallel_size(world, tensor=8, pipeline=2) == 16
    assert data_parallel_size(world, sequence=8) == 32
    assert data_parallel_size(world, tensor=8, pipeline=2, sequence=8) == 2


@given(*[st.integers(1, 8)] * 4, st.integers(1, 5000))
def test_data_parallel_size_or_the_nearest_devices(tensor, pipeline, context, sequence, world):
    """The devices divide evenly, or the error has the nearest numbers of devices that do."""
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "sequence": sequence}
    shared = tensor * pipeline * context * sequence
    try:
        assert data_parallel_size(world, **sizes) * shared == world
    except BatchDivisibilityError as error:
        assert world % shared != 0
        assert (error.value, error.divisor, error.key) == (world, shared, "num_devices")
        for near in error.nearest:
            assert data_parallel_size(near, **sizes) >= 1
            assert abs(near - world) < shared or near == shared


def test_data_parallel_size_reports_all_problems():
    """Every size below 1 is named."""
    with pytest.raises(RampupError) as caught:
        data_parallel_size(0, tensor=-1, context=0, key="world_size")
    assert [problem.key for problem in caught.value.problems] == ["world_size", "tensor", "context"]


def test_bytes_agree_with_numpy():
    """Every type has NumPy's size. bfloat16, which NumPy lacks, has two bytes."""
    for name, size in BYTES.items():
        assert size == (2 if name == "bfloat16" else np.dtype(name).itemsize)


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("reference", [False, True])
def test_experience_bytes_agree_with_arrays(critic, reference):
    """The bytes are the sum of those of arrays of these shapes and types."""
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


def test_experience_reports_all_problems():
    """Lengths and types are checked together."""
    with pytest.raises(ConfigError) as caught:
        Experience(max_prompt_length=0, max_response_length=-1, token_dtype="int33", value_dtype="")
    assert [problem.key for problem in caught.value.problems] == [
        "max_prompt_length",
        "max_response_length",
        "token_dtype",
        "value_dtype",
    ]
