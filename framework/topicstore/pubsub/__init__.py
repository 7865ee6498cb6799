"""Publishing and subscribing inside a process: first the stored messages, then new messages live.

`FilterIndex` finds the filters that match a topic. `Hub` notifies the followers of a commit, which are subscriptions
and sessions. `Feed` reads for all followers of one filter, and `Subscription` is the public object
(`topicstore.Database.subscribe`).
"""
