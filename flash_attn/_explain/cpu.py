"""What serves a call on a CPU."""

from __future__ import annotations

from .explanation import Explanation
from .problem import Problem


def on_cpu(problem: Problem) -> Explanation:
    slow: tuple[str, ...] = ()
    by_torch = "torch's own CPU flash attention"
    tiled = "tiled online softmax on torch operations"
    not_on_gpu = ("CUDA kernels", f"q is on {problem.q.device}")
    if problem.way is not None:
        return Explanation(
            problem.operation, str(problem), backend="cpu", rejected=(not_on_gpu,),
            kernel="float32 attention of codes times descales, a few heads at a time",
            why="the CPU backend serves every option",
        )  # fmt: skip
    obstacles = _obstacles_to_torch(problem)
    if obstacles:
        kernel, why = tiled, f"the CPU backend serves every option; {by_torch} does not"
        rejected = [(by_torch, f"has no {obstacle}") for obstacle in obstacles]
        slow = (f"torch's kernel, several times as fast, has no {' and no '.join(obstacles)}",)
    else:
        kernel, why = by_torch, "it expresses the call exactly, block of rows by block of rows"
        if "paged" in problem.extras:
            why += "; sequences with an absent page run the tiled path"
        rejected = [(tiled, "is slower")]
    return Explanation(
        problem.operation, str(problem), backend="cpu", why=why, kernel=kernel,
        rejected=(*rejected, not_on_gpu), slow=slow + whole_matrix(problem),
    )  # fmt: skip


def whole_matrix(problem: Problem) -> tuple[str, ...]:
    asked = "attn_probs" in problem.extras and not problem.backward
    return ("return_attn_probs forms the whole matrix",) * asked


def _obstacles_to_torch(problem: Problem) -> list[str]:
    """What of the call torch's kernel cannot express."""
    from flash_attn.cpu import options  # here: `import flash_attn` leaves the CPU backend out

    q, v = problem.q, problem.v
    obstacles = options.beyond_torch(problem.extras, q)
    asked = "max_logits" in problem.extras and not problem.backward
    obstacles += ["max_logits"] * asked
    if problem.latent:
        obstacles += ["keys of more columns than values"] * bool(q.shape[-1])
    elif not options.torch_takes(q, v):
        obstacles.append(f"head_dim {v.shape[-1]} of v beside {q.shape[-1]} of q")
    return obstacles
