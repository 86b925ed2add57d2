"""What variance reduction does to the gradients, measured in the step itself, where all that it takes is at hand."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from mars_hf.optim.rules import gradients
from mars_hf.optim.sharding import sum_over_ranks
from mars_hf.optim.update import Update

# Steps over which the variances are averaged.
WINDOW = 20


class VarianceReduction:
    """Compares g, its reference h and c = g + alpha (g - h), before the clip, for every matrix that has an h.

    Set `measures` before the steps to look at; `read()` afterwards. While it is False nothing is computed. A measured
    step reads g, h and `exp_avg` a few times more, and adds up over the ranks once.
    """

    def __init__(self) -> None:
        self.measures = False
        # For each tensor ||g||^2, ||h||^2, ||g - h||^2, g (g - h), ||g - m||^2, ||c - m||^2, alpha, clip_c.
        self._rows: list[Tensor] = []
        self._variances: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._exact = False

    @torch.no_grad()
    def measure(self, updates: Sequence[Update]) -> None:
        """Looks at updates that are about to be applied; every rank must call it in the same step.

        Args:
            updates: of which none has begun; only read.
        """
        updates = [u for u in updates if u.x.last_grad]
        sums = sum_over_ranks([u.sharding for u in updates], [_products(u).flatten() for u in updates])
        for update, products in zip(updates, sums):
            assert products is not None  # each one was given
            matrices = [len(shape) >= 2 for shape in update.sharding.shapes(update.x.params)]
            rows = products.view(len(matrices), 6)[matrices]
            clip_c = update.hyper.clip_c
            constants = [update.hyper.alpha, float("inf") if clip_c is None else clip_c]
            self._rows.append(torch.cat([rows, rows.new_tensor([constants]).expand(len(rows), 2)], dim=1).cpu())
            self._exact = not update.hyper.is_approx

    def read(self) -> dict[str, float]:
        """The means over the matrices measured since the last call; empty if there were none with h and g not 0.

        Returns:
            `relative_change` ||g - h|| / ||g||, `cosine` of g and h, `clipped` the share of matrices with
            ||c|| > clip_c, `c_over_g` ||c|| / ||g||; in exact mode `variance_ratio`, the mean squared distance of c
            from the momentum by that of g, over the last 20 measured steps: below 1 variance was reduced. The momentum
            stands for the unknown full gradient; where c is clipped it is too short, and the ratio says little.
        """
        rows, self._rows = self._rows, []
        if not rows:
            return {}
        all_rows = torch.cat(rows)
        gg, hh, dd, gd, gm, cm, a, clip_c = all_rows[(all_rows[:, 0] > 0) & (all_rows[:, 1] > 0)].unbind(dim=1)
        if not len(gg):
            return {}
        c_norms = (gg + 2 * a * gd + a.square() * dd).clamp(min=0).sqrt()
        metrics = {
            "relative_change": (dd / gg).sqrt(),
            "cosine": (gg - gd) / (gg * hh).sqrt(),
            "clipped": (c_norms > clip_c).double(),
            "c_over_g": c_norms / gg.sqrt(),
        }
        results = {name: values.mean().item() for name, values in metrics.items()}
        if self._exact:
            self._variances.append((cm.sum().item(), gm.sum().item()))
            of_c, of_g = (sum(values) for values in zip(*self._variances))
            results["variance_ratio"] = of_c / of_g if of_g else float("nan")
        return results


def _products(update: Update) -> Tensor:
    """The first six columns of `VarianceReduction._rows` for this rank's part of each tensor, float64."""
    rows = []
    a = update.hyper.alpha
    for g, h, m in zip(gradients(update.x, update.numbers), update.x.last_grad, update.x.exp_avg):
        g, h, m = (t.flatten().to(torch.promote_types(t.dtype, torch.float32)) for t in (g, h, m))
        d, from_m = g - h, g - m
        c_from_m = from_m.add(d, alpha=a)
        pairs = ((g, g), (h, h), (d, d), (g, d), (from_m, from_m), (c_from_m, c_from_m))
        rows.append(torch.stack([torch.dot(x, y) for x, y in pairs]))
    return torch.stack(rows).double()
