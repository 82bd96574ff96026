"""Where celery_budget meets Celery and kombu; nothing outside imports them.

:mod:`~celery_budget.integration.install` ties an application to its ledger. Publications pass
:mod:`~celery_budget.integration.gate`, which has them captured
(:mod:`~celery_budget.integration.capture`) and admitted. Beat or the command line runs
:mod:`~celery_budget.integration.service`, which publishes them. In the worker
:mod:`~celery_budget.integration.execution` claims and settles around each task's call, and
:mod:`~celery_budget.integration.worker` keeps leases alive and closes what has ended.
"""
