"""The long forms run by `pytest -m faults` alone."""


def pytest_collection_modifyitems(config, items):
    """Leave the long forms out unless they are asked for."""
    if "faults" in config.option.markexpr:
        return
    long_forms = [item for item in items if item.get_closest_marker("faults")]
    if long_forms:
        config.hook.pytest_deselected(items=long_forms)
        items[:] = [item for item in items if not item.get_closest_marker("faults")]
