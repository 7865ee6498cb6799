"""How a run is made: a plan, the data of its workloads, and groups of cells that Spark has run one by one.

``choosing``   from what somebody asks for to a plan
``plan``       what is to be measured; ``run.json``
``dataset``    the messages of a workload as Parquet, made by Spark, and the answers to its requests
``answers``    what replays must give, and whether they do
``measuring``  one store and one replay, timed; the figures of layouts are made of it too
``phases``     what a cell measures
``cell``       the process in which one contender is measured
``group``      the cells of a workload, a durability and a repetition, taking turns phase by phase
``drive``      all of it
``machine``    what the figures were measured on
"""
