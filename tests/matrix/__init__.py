"""The tests that tell most, over each Python, each end of the dependencies and each PostgreSQL there is.

What cannot be had here is named, and left out.
"""
