"""Pipelines that come with memq, for Spark: `python -m memq.spark.pipelines NAME …`, or the same by spark-submit."""
