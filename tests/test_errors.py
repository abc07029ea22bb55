"""Tests of rampup.errors."""

import pickle

import pytest

from rampup import errors
from rampup.errors import (
    BatchDivisibilityError,
    ConfigError,
    RampDefinitionError,
    RampupError,
    a_type,
    raise_together,
)


def test_errors_derive_from_builtins():
    """Each error is also the built-in exception that a caller would expect, and a bad
    ramp, split or pipeline a ConfigError.
    """
    for name in ("ConfigError", "ResumeMismatchError", "DataError"):
        assert {RampupError, ValueError} <= set(getattr(errors, name).__mro__)
    for name in ("RampDefinitionError", "BatchDivisibilityError", "PipelineShapeError"):
        assert issubclass(getattr(errors, name), ConfigError)
    assert issubclass(errors.MissingDependencyError, ImportError)


def test_raise_together_combines_problems():
    """All problems are raised as one error of the first one's type, nested ones are
    flattened, and a thousand summarized.
    """
    inner = [RampDefinitionError("a", key="ka"), ConfigError("b")]
    with pytest.raises(RampDefinitionError, match="2 problems") as first:
        raise_together(inner)
    with pytest.raises(RampDefinitionError, match="3 problems") as caught:
        raise_together([first.value, ConfigError("c")])
    assert [str(problem) for problem in caught.value.problems] == ["a", "b", "c"]
    assert caught.value.key == "ka"
    assert str(inner[0]) == "a"
    with pytest.raises(ConfigError, match="and 980 more"):
        raise_together([ConfigError(str(n)) for n in range(1000)])


def test_errors_keep_their_attributes_through_pickle_and_name_their_location():
    """Also those whose arguments have no default; a configuration error has file and
    line.
    """
    error = BatchDivisibilityError("no", value=10, divisor=4, key="k")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.nearest_below, copy.nearest_above, copy.key, str(copy)) == (
        8,
        12,
        "k",
        "no",
    )
    copy = pickle.loads(
        pickle.dumps(ConfigError("bad", key="k", path="a.yml", line=3), protocol=0)
    )
    assert (str(copy), copy.line) == ("a.yml:3: bad", 3)
    # An OSError, whose __new__ leaves its arguments out.
    copy = pickle.loads(pickle.dumps(errors.StorageError("disk full", key="k")))
    assert (str(copy), copy.key) == ("disk full", "k")
    assert str(ConfigError("bad", path="command line")) == "command line: bad"


def test_types_have_their_article():
    """Messages say "an int" and "a str"."""
    assert (a_type(1), a_type("x")) == ("an int", "a str")


def test_a_message_is_the_problem_and_its_fix():
    """The parts of a message are joined in one place, behind the file and the line."""
    error = errors.ConfigError("steps=0 is too few", fix="set steps=1", key="steps")
    assert str(error) == "steps=0 is too few; set steps=1"
    error = errors.ConfigError("steps=0", fix="set steps=1", path="a.yml", line=3)
    assert str(error) == "a.yml:3: steps=0; set steps=1"
    assert str(errors.DataError("no rows")) == "no rows"
