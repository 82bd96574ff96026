"""The pure part: amounts, identities, policies, reservation states and messages.

Imports the standard library and :mod:`celery_budget.errors` only. Nothing here knows of a
database, of Celery or of the time of day.
"""
