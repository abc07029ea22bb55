"""The subcommands of the command line: for each its options and a function that runs it, no logic."""
