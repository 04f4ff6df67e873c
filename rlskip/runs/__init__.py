"""What is below a dump_dir: runs, steps, dumps, their rows as trajectories, and counts."""
