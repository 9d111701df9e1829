"""A topic as Parquet files under a manifest."""
