"""What budgets cost, measured beside the same work without them.

Each benchmark starts its own servers, runs the sides it compares in turns within one process, and
reports medians, quartiles and the ratio of what ran next to each other. The figures say something
about each other on one machine; they are not asserted anywhere.
"""
