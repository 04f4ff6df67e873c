"""What is below a dump_dir: runs, steps and calls, and their rollouts as rows, sessions, groups."""
