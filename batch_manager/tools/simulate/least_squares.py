"""Non-negative least squares."""

import numpy as np

TOLERANCE = 1e-12


def nonnegative_least_squares(columns: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the vector x >= 0 [k] that minimises |columns @ x - targets|, with columns [n, k] and targets [n].

    Source: the active-set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.
    """
    scales = np.sqrt((columns ** 2).sum(0))
    scales[scales == 0] = 1.0
    matrix = columns / scales
    normal, right = matrix.T @ matrix, matrix.T @ targets
    count = matrix.shape[1]
    x, is_free = np.zeros(count), np.zeros(count, bool)
    tolerance = TOLERANCE * max(float(np.abs(right).max(initial=0.0)), 1e-300)
    for _ in range(10 * count):
        gradient = right - normal @ x
        gradient[is_free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        is_free[best] = True
        while True:
            free = np.flatnonzero(is_free)
            solution = np.linalg.lstsq(normal[np.ix_(free, free)], right[free], rcond=None)[0]
            if (solution > 0).all():
                x[:] = 0
                x[free] = solution
                break
            # Move towards the solution until the first coefficient is 0, and fix it there.
            blocked = solution <= 0
            steps = x[free][blocked] / (x[free][blocked] - solution[blocked])
            x[free] += steps.min() * (solution - x[free])
            is_free[free[x[free] <= 1e-15 * max(float(x.max()), 1e-300)]] = False
            x[~is_free] = 0
            if not is_free.any():
                break
    return x / scales
