"""A reward function of two values, so that the groups of some prompts have no variance."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    return {"score": float(sum(map(ord, solution_str)) % 2), "acc": len(solution_str) % 2}
