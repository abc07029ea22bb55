"""Fixtures of the tests of rampup.engine."""

import jax
import pytest


@pytest.fixture(scope="module")
def float64():
    """Compute in float64, and forget executables that no other module shares."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)
    jax.clear_caches()
