"""Where two trainings first differ: recorded stages, compared row by row, or rollouts."""
