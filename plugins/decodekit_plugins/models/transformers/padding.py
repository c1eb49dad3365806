"""Whether a model's answer depends on the padding before a prompt."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from decodekit.errors import PipelineError
from decodekit.prompt import Prompt, places

TOKENS = 3
"""Length of the prompt that is tried, alone and behind as much padding."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""How much logits may differ, in units of their spread; half precision rounds more."""

_found: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def refuse_padding(adapter: Any, name: str, prompt: Prompt) -> None:
    """Raise `PipelineError` for padded rows where a row would depend on its neighbours' length.

    A model that is told positions can leave padding out. Of others some ask the mask, or need no positions; the rest
    count padding as text. Two passes over a few tokens tell, once for each model: no signature or configuration does.
    """
    facts, fix = adapter.facts, "pass prompts of one length, or one by one"
    if not facts.mask:
        raise PipelineError(f"{name} takes no attention_mask: {fix}")
    model = adapter.model
    if facts.positions or model.training:  # nothing can be told where dropout is at work
        return
    found = _found.setdefault(model, {})
    # Some know padding by its token.
    fill = 0 if prompt.mask is None else int(prompt.tokens[~prompt.mask][0])
    if fill not in found:
        found[fill] = _depends(adapter, fill)
    if found[fill]:
        raise PipelineError(f"{name} counts padding as positions, or reads it as text: {fix}")


@torch.no_grad()
def _depends(adapter: Any, fill: int) -> bool:
    spec = adapter.spec
    known = spec.num_embeddings or spec.vocab_size
    tokens = torch.arange(1, TOKENS + 1, device=spec.device)[None] % known
    padded = torch.cat([torch.full_like(tokens, fill), tokens], 1)
    mask = torch.cat([torch.zeros_like(tokens), torch.ones_like(tokens)], 1).bool()
    try:
        alone = adapter.forward(tokens, places(mask[:, TOKENS:]), None).logits[0, -1].float()
        behind = adapter.forward(padded, places(mask), None, mask=mask).logits[0, -1].float()
    except Exception:  # it needs more than tokens: the run itself will tell
        return False
    gap = float((alone - behind).abs().max() / alone.std().clamp(min=1e-12))
    return gap > TOLERANCE.get(spec.dtype, 0.05)
