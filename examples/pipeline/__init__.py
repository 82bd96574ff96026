"""Stages of one paper as chain and chord, with a soft stop: ``make example NAME=pipeline``."""
