"""The speed of buses by route and time of day, queried with Spark SQL directly from the store.

    python main.py DIRECTORY [MESSAGES.parquet]

The first run fills the store, through Spark, from a Parquet file of bus positions (topics end in
``…/<route>/<vehicle>``, payloads are JSON with a ``speed``). Without a file it generates positions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from topicstore.spark import session

MADE = """
SELECT timestamp_micros(1735689600000000 + id * 864000) AS timestamp,
       concat('city/vp/', route, '/', vehicle) AS topic,
       concat('bus-', vehicle) AS client_id,
       to_binary(to_json(named_struct('speed', round(speed, 1))), 'utf-8') AS payload
FROM (SELECT id, id % 60 AS vehicle, 10 * (1 + id % 60 % 5) AS route,
             6 + id % 60 % 5 + 3 * cos(id / 50000 * pi()) + 2 * rand(7) AS speed
      FROM range(100000))
"""
"""Generates a day of 60 buses on five routes. Buses on higher routes are faster, and all are slow at midday."""

QUESTION = """
WITH positions AS (
    SELECT regexp_extract(topic, '([^/]+)/[^/]+$', 1) AS route,
           hour(from_utc_timestamp(timestamp, :zone)) AS hour,
           CAST(get_json_object(decode(payload, 'utf-8'), '$.speed') AS DOUBLE) AS speed
    FROM messages
), busiest AS (
    SELECT route FROM positions GROUP BY route ORDER BY count(*) DESC, route LIMIT 8
), moving AS (
    SELECT route, speed,
           CASE WHEN hour < 6 THEN 'night' WHEN hour < 10 THEN 'morning' WHEN hour < 15 THEN 'midday'
                WHEN hour < 19 THEN 'afternoon' ELSE 'evening' END AS part
    FROM positions LEFT SEMI JOIN busiest USING (route)
    WHERE speed > 0
)
SELECT * FROM moving
PIVOT (round(percentile(speed, 0.5), 1) FOR part IN ('night', 'morning', 'midday', 'afternoon', 'evening'))
ORDER BY CAST(route AS INT), route
"""


def main() -> None:
    """Fill the store if it doesn't exist, and query it."""
    directory, *file = map(Path, sys.argv[1:])
    spark = session()
    if not directory.exists():
        source = spark.read.parquet(str(file[0])) if file else spark.sql(MADE)
        source.write.format("topicstore").option("shards", 4).mode("append").save(str(directory))
    # The view reads only messages that the options select; `option("start", "2015-05-01")` would skip earlier ones.
    messages = spark.read.format("topicstore").option("filter", "+/vp/+/+").load(str(directory))
    messages.createOrReplaceTempView("messages")
    zone = "America/Chicago" if file else "UTC"
    print(f"{messages.count():,} positions; median speed of moving buses, as published, on the busiest routes")
    spark.sql(QUESTION, {"zone": zone}).show()
    spark.stop()


if __name__ == "__main__":
    main()
