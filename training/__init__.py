"""Training: data, optimizer, the ranks, the loop and the run folder."""
