"""What a provider's reply has used, and what that costs.

Both are told by the genai-prices package, which is imported when it is first needed: by ``replies``
(a reply's numbers, by that package's names), ``streams`` (a reply that comes in chunks) and
``prices``. No other module knows it.
"""

from celery_budget.metering.prices import counted, price
from celery_budget.metering.replies import Reply, is_reply, read
from celery_budget.metering.streams import Gathered

__all__ = ["Gathered", "Reply", "counted", "is_reply", "price", "read"]
