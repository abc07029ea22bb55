"""A plan and a run, shown to people."""
