"""Publishing and following inside a process: first the stored messages, then new ones live.

`FilterIndex` finds the filters that match a topic, `Hub` notifies the followers of a commit, `Feed` reads for all
followers of one filter, and `Subscription` is the object that a program holds (`topicstore.Database.subscribe`).
"""
