"""The README's application: ``make example NAME=readme``."""
