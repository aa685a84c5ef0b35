"""The lake's fence without Spark: production's steps (`spark_consumers.lake.manifest.takeover`) over a store in memory."""
