"""What several processes agree on: leases, ranks, nodes, the records of hits and misses."""
