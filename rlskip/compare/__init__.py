"""Where two trainings first differ: their recorded stages, compared row by row, or their rollouts.

:func:`~rlskip.compare.sides.find_side` reads what a user calls a run,
:func:`~rlskip.compare.steps.compare_step` compares one step of two, and
:class:`~rlskip.compare.verdict.Comparison` says which stage differs first.
:mod:`rlskip.compare.rollouts` makes records of dumps, so that these are compared alike.
"""
