"""Publishing and following inside a process: what is stored, and then live what comes.

`FilterIndex` says whose filter matches a topic, `Hub` who is told of a commit, `Feed` reads for all who follow one
filter, and `Subscription` is what a program holds (`topicstore.Database.subscribe`).
"""
