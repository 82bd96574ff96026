"""Report data turned into text: tables for people, documents for programs. Never prints.

What goes into a table is taken literally: no markup, no emoji codes, and whatever could move a
terminal's cursor is written as its escape.
"""
