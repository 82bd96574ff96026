"""A free lane and a paid one: ``make example NAME=fallback``."""
