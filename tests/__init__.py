"""The tests of celery_budget."""
