"""Orders and the work they cause in one transaction: ``make example NAME=django``."""
