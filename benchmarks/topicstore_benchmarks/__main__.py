"""``python -m topicstore_benchmarks``: the same as ``topicstore bench``."""

from topicstore_benchmarks.sections.command import main

if __name__ == "__main__":
    main()
