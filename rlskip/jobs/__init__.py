"""What several processes agree on: leases, the ranks of a job, the records of hits and misses."""
