"""Following a filter: what is stored, then live what comes.

`Routes` says whose filter matches a topic, `Hub` who is told of a commit, `Feed` reads for all who
follow one filter, and `Subscription` is what a program holds (`topicstore.Database.subscribe`).
"""

from __future__ import annotations

from .subscription import Place, Subscription, SubscriptionBatch, SubscriptionStatus

__all__ = ["Place", "Subscription", "SubscriptionBatch", "SubscriptionStatus"]
