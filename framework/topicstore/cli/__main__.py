"""``python -m topicstore.cli``."""

from . import main

main()
