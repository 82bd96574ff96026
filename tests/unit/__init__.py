"""Tests of pure code, without services."""
