"""What each chosen token scored, read back from recorded scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from decodekit.errors import InputError
from torch import Tensor


def compute_transition_scores(
    sequences: Tensor, scores: Sequence[Tensor], beam_indices: Tensor | None = None, normalize_logits: bool = False
) -> Tensor:
    """The score of every new token at the step that chose it: float [rows, new tokens].

    sequences: int64 [rows, T] as `generate` returns them; the last `len(scores)` columns at most are new.
    scores: one [all rows, V] tensor for each step (``output_scores=True``).
    beam_indices: int [rows, new tokens] of a beam search: the row of `scores` that each token was chosen by; behind a
        sequence's end it is -1 and the score 0. Their sum over length ** length_penalty is the sequence's score.
    normalize_logits: make log-probabilities of the scores first (beams hold them already).

    Raises `InputError` where the shapes do not belong together.
    """
    if not scores:
        raise InputError("there are no scores: call generate with output_scores=True")
    new = len(scores) if beam_indices is None else beam_indices.shape[1]
    if new > min(len(scores), sequences.shape[1]) or (beam_indices is None and len(sequences) != len(scores[0])):
        what = f"sequences {tuple(sequences.shape)} and {len(scores)} scores of shape {tuple(scores[0].shape)}"
        raise InputError(f"{what} are not of one call; a beam search needs its beam_indices, too")
    rows = torch.arange(len(sequences), device=sequences.device)[:, None].expand(-1, new)
    rows = rows if beam_indices is None else beam_indices.long()
    found = []
    # Column by column: all steps at once would need as much memory again as was recorded.
    for step, (row, token) in enumerate(zip(rows.unbind(1), sequences[:, -new:].unbind(1), strict=True)):
        chosen = scores[step][row.clamp(min=0)]
        chosen = chosen.float().log_softmax(-1) if normalize_logits else chosen
        found.append(chosen.gather(1, token[:, None])[:, 0].masked_fill(row < 0, 0.0))
    return torch.stack(found, 1)
