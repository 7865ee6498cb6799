"""The execution of a run: a plan, the data sets of its workloads, and trials, which Spark runs as one job.

``choosing``   makes a plan from the requested options
``plan``       the plan of a run, stored in ``run.json``
``dataset``    the messages of a workload as Parquet, the expected replays of its requests, and checks of replays
``phases``     the measurements of a worker
``worker``     the process in which one contender is measured
``trial``      the workers of a workload, a durability and a repetition, which run each phase in turn
``drive``      a whole run, with Spark
``hardware``   the machine and the versions of a measurement
"""
