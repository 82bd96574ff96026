"""Real provider clients against a local stand-in: ``make example NAME=provider``."""
