"""Why is nothing skipped? What is installed, and what a command would skip."""
