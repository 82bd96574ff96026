"""Programs that run on this machine alone: ``make example NAME=fastapi``."""
