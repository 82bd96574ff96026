"""What would break the guarantees, rule by rule: pure functions of what was seen.

A rule returns what it sees that is wrong, nothing where all is right, or :class:`Skipped` with the
reason where it could not look. The order of the rules is that of the modules here.
"""

from celery_budget.core.rules import brokers, tasks, ledger, replicas, workers  # isort: skip
from celery_budget.core.rules.rule import RULES, Rule, Skipped, judge

__all__ = [
    "RULES",
    "Rule",
    "Skipped",
    "brokers",
    "judge",
    "ledger",
    "replicas",
    "tasks",
    "workers",
]
