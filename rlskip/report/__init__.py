"""The page: one HTML file that shows a run, or two runs side by side."""
