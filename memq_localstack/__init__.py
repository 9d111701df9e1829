"""Real Kafka, ZooKeeper and S3 on one machine, by pip alone: for tests, demos and a first look.

`memq_localstack.servers` starts them from Python, `memq-localstack up|down|status` from a shell. Nothing here is
imported by memq, and nothing here imports it.
"""
