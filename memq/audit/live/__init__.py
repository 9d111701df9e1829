"""The live audit: compares reports of clients with the queue, by partition and minute."""
