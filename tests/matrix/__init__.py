"""The tests that tell most, over each Python, each end of the dependencies and each PostgreSQL.

What cannot be had here is named, and left out.
"""
