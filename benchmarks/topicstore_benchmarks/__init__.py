"""How fast topicstore is, against the limits of the engine below it.

`cases` says what is stored, `limits` measures the engine alone, `ratios` runs both sides in
turn, ``python -m topicstore_benchmarks`` prints what came out.
"""
