"""The examples, run by their one command."""
