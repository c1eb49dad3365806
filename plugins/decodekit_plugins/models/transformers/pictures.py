"""Decoders that see pictures: what must fit together in the prompt, and BLIP-2, which reads pictures as embeddings."""

from __future__ import annotations

from typing import Any

import torch
from decodekit.errors import DecodekitError, InputError, named
from decodekit.prompt import Prompt
from decodekit.settings import Settings
from torch import Tensor

from .adapter import PROMPT_ONLY, TransformersAdapter
from .sources import shapes

MARKS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""What configurations call the token that stands at a picture's places."""
BLIP = ("blip-2", "blip_2")
"""Model types that make embeddings of a picture, behind which another model writes."""


def marks_of(model: Any) -> list[int]:
    """The tokens that stand at places of pictures."""
    found = (getattr(model.config, name, None) for name in MARKS)
    return sorted({mark for mark in found if isinstance(mark, int) and mark >= 0})


class PictureAdapter(TransformersAdapter):
    """Adapter of a decoder that has pictures merged into the places of its prompt (LLaVA and its kin)."""

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """As of any decoder. Raises `InputError` for places without pictures, which would be read as words, and for
        places that chunks of the prompt would cut off their pictures."""
        more: Any = {"settings": settings, "tokenizer": tokenizer, "past": past}
        prompt, given = super().arrange(inputs, mask, model_kwargs, **more)
        shown = [name for name, value in given.items() if name.startswith(PROMPT_ONLY) and value is not None]
        marks = torch.tensor(marks_of(self.model), device=prompt.tokens.device)
        at = torch.isin(prompt.tokens, marks).any(0).nonzero()[:, 0].tolist()
        if at and not shown and not past and given.get("inputs_embeds") is None:
            raise InputError(f"the prompt has places for pictures, but there are none: {self._name} reads pixel_values")
        size = settings.get("prefill_chunk_size")
        if shown and size and size < prompt.tokens.shape[1] and (not at or at[-1] >= size):
            last = f"to {at[-1] + 1} or more" if at else "higher"
            raise InputError(f"prefill_chunk_size: {self._name} reads its pictures with the first chunk: "
                             f"set it {last}, or leave it out")  # fmt: skip
        return prompt, given

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any, /, **keys: Any) -> Any:
        """Errors of the pass that reads pictures say what it was given: their number is known to the model alone."""
        shown = {name: value for name, value in keys.items() if name.startswith(PROMPT_ONLY)}
        if not shown:
            return super().forward(tokens, positions, cache, **keys)
        try:
            return super().forward(tokens, positions, cache, **keys)
        except DecodekitError:
            raise
        except Exception as error:
            places = sum(int((tokens == mark).sum()) for mark in marks_of(self.model))
            words = f"{self._name}, given {shapes(shown)} and a prompt with {places} places for pictures"
            raise named(error, words, InputError) from error


class Blip2Adapter(TransformersAdapter):
    """Adapter of `Blip2ForConditionalGeneration` around a decoder, which reads pictures as embeddings.

    What the model writes is the decoder's, with every ability of it; `model` is the decoder, `whole` all of it.
    """

    def __init__(self, whole: Any, tokenizer: Any = None) -> None:
        super().__init__(whole.language_model, tokenizer)
        self.whole = whole
        self.model_kwargs = self.model_kwargs - {"inputs_embeds"} | {"pixel_values", "interpolate_pos_encoding"}

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """The rows to continue; without inputs, the places of a picture and bos, for each of `pixel_values`
        [B, C, H, W]. Pictures are read here, once for each prompt.

        Raises `InputError` where there are no pictures, or places for more or fewer than there are.
        """
        given: dict[str, Any] = dict(model_kwargs)
        pixels, wide = given.pop("pixel_values", None), given.pop("interpolate_pos_encoding", False)
        name, said = type(self.whole).__name__, self.whole.config
        if not isinstance(pixels, Tensor) or pixels.dim() != 4 or not len(pixels):
            got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
            raise InputError(f"{name} reads pictures: pass pixel_values [B, C, H, W], got {got}")
        if past:
            raise InputError("pixel_values cannot follow a cache: pass the whole prompt without it")
        if settings.get("prefill_chunk_size"):
            raise InputError(f"prefill_chunk_size: {name} reads its prompt as embeddings, at once; leave it out")
        mark, number = said.image_token_index, said.num_query_tokens
        if inputs is None:
            inputs = [[mark] * number + [said.text_config.bos_token_id]] * len(pixels)
        more: Any = {"settings": settings, "tokenizer": tokenizer, "past": past}
        prompt, given = super().arrange(inputs, mask, given, **more)
        at = prompt.tokens == mark
        if int(at.sum()) != len(pixels) * number:
            raise InputError(
                f"the prompts have {int(at.sum())} places for pictures (token {mark}), and {len(pixels)} pictures take "
                f"{number} each: pass both as the model's processor makes them"
            )
        with torch.no_grad():
            try:
                seen = self.whole.get_image_features(pixels, interpolate_pos_encoding=wide, return_dict=True)
            except Exception as error:
                raise named(error, f"{name}, given {shapes({'pixel_values': pixels})}", InputError) from error
            embeds = self.model.get_input_embeddings()(prompt.tokens)
            given["inputs_embeds"] = embeds.masked_scatter(at[..., None], seen.pooler_output.to(embeds))
        return prompt, given


def adapter_of(model: Any) -> TransformersAdapter:
    """The adapter of a decoder, by what it reads beside tokens."""
    if getattr(model.config, "model_type", None) in BLIP and hasattr(model, "language_model"):
        return Blip2Adapter(model)
    return PictureAdapter(model) if marks_of(model) else TransformersAdapter(model)
