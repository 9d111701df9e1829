"""The consumer: pointers become batches of records, in order, and positions are committed."""
