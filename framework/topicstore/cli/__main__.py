"""The module behind ``python -m topicstore.cli``."""

from . import main

main()
