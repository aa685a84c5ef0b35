"""The lake's fence without Spark: production's steps (`spark_consumers.lakehouse.takeover`) over a store in memory."""
