"""The owner of one partition: ring, opening, proof, publishing, dedup window."""
