"""How a run is made: a plan, the data of its workloads, and trials of workers, which Spark runs as one job.

``choosing``   from the requested options to a plan
``plan``       what is to be measured; ``run.json``
``dataset``    the messages of a workload as Parquet, the expected replays of its requests, and checks of replays
``phases``     the measurements of a worker
``worker``     the process in which one contender is measured
``trial``      the workers of a workload, a durability and a repetition, taking turns phase by phase
``drive``      a whole run, by Spark
``hardware``   the machine and versions of a measurement
"""
