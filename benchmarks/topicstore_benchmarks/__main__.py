"""``python -m topicstore_benchmarks``: the same as ``topicstore bench``."""

from topicstore_benchmarks.cli import bench

if __name__ == "__main__":
    bench(prog_name="python -m topicstore_benchmarks")
