"""What delivers events to other services: who is told, where it may go, how it is signed, how often.

The rounds are made by a worker's schedule; nothing here is called while a request waits.
"""

from dcp.server.webhooks.delivering import Deliverer, deliver_due
from dcp.server.webhooks.ledger import forget_deliveries, is_anything_due

__all__ = ["Deliverer", "deliver_due", "forget_deliveries", "is_anything_due"]
