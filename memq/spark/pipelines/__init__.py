"""Pipelines for Spark: `python -m memq.spark.pipelines NAME …`, or by spark-submit."""
