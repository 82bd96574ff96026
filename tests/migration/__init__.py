"""The schema and its migrations, on every store."""
