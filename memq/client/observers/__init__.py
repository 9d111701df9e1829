"""What clients report, count and trace: observers of producers and consumers."""
