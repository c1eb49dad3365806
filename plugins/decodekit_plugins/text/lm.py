"""`load` gives a model and its tokenizer together: text in, text out."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from decodekit.api import plan
from decodekit.errors import InputError
from decodekit.graphs import outside_graphs
from decodekit.models import adapter_for
from decodekit.options import Choices
from decodekit.outputs import GenerateDecoderOnlyOutput
from decodekit.pipeline import Pipeline
from decodekit.protocols import ModelAdapter
from decodekit.run import Run
from decodekit.settings import CALLER
from decodekit.text import TextPieces, Tokenizer, as_tokenizer, row_pieces

from .opening import open_model

RECORDED = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
"""Keys that ask for more than text."""
HEARD = ("input_features", "input_values", "pixel_values", "inputs_embeds", "encoder_outputs")
"""Arguments that an encoder may read in place of text."""
PREPARE = "auto"
"""The preparer of runs that name none."""
Messages = Sequence[Mapping[str, Any]]


def load(
    ref: Any, *, adapter: str | None = None, tokenizer: Any = None, prepare: str | None = PREPARE, **options: Any
) -> LM:  # fmt: skip
    """Load a model by name (``bundled``), folder or Hub id, or wrap a model object you have.

    adapter: the models plugin to use; unset: the first that can open it, `native` before `transformers`.
    tokenizer: yours, where the model comes without one. options: the plugin's own (dtype, device, revision, ...).
    prepare: the preparer of runs that do not name another one; ``auto`` reorders weights for the CPU where that is
        worth its time and memory, None leaves everything as it is. The model object stays the same.

    Raises `PluginNotFound` when no plugin can open it, `InputError` when the checkpoint is broken.
    """
    if isinstance(ref, str) or hasattr(ref, "__fspath__"):
        opened = open_model(str(ref), adapter=adapter, **options)
    elif options:
        raise InputError(f"{', '.join(options)}: options of opening a checkpoint, but this model is made already")
    else:
        opened = adapter_for(ref, adapter)
    return LM(opened, tokenizer, prepare)


class LM:
    """A model with its tokenizer. `generate` returns text; for token tensors call `decodekit.generate(lm, ...)`."""

    def __init__(self, adapter: ModelAdapter, tokenizer: Any = None, prepare: str | None = PREPARE) -> None:
        self.adapter = copy.copy(adapter)
        if prepare is not None and hasattr(self.adapter, "__dict__"):
            self.adapter.__dict__["defaults"] = {"prepare": prepare, **adapter.defaults}
        given = tokenizer if tokenizer is not None else adapter.tokenizer
        self._tokenizer = None if given is None else as_tokenizer(given)
        if tokenizer is not None:  # so that whoever takes the adapter gets its tokenizer, too
            self.adapter.tokenizer = self._tokenizer

    def __decodekit_adapter__(self) -> ModelAdapter:
        return self.adapter

    @property
    def model(self) -> Any:
        """The module behind the adapter."""
        return getattr(self.adapter, "model", self.adapter)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises `InputError` where the model came without one."""
        if self._tokenizer is None:
            raise InputError("this model has no tokenizer: pass load(..., tokenizer=...)")
        return self._tokenizer

    def tokens(self, prompt: str | Messages | Sequence[int]) -> list[int]:
        """Token ids of a text, or of chat messages (dicts with role and content) where there is a template."""
        prompt = _plain(prompt)
        if isinstance(prompt, str):
            reads = self.tokenizer.encode_whole if self.adapter.spec.is_encoder_decoder else self.tokenizer.encode
            return list(reads(prompt))
        if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
            raise InputError(f"a prompt is text, token ids or chat messages, not {type(prompt).__name__}: {prompt!r}")
        messages = [isinstance(item, Mapping) for item in prompt]
        if any(messages):
            if not all(messages):
                other = type(prompt[messages.index(False)]).__name__
                raise InputError(f"chat messages are dicts with role and content, but one of these is of type {other}")
            return list(self.tokenizer.chat(cast(Messages, prompt)))
        return list(cast("Sequence[int]", prompt))

    def _many(self, prompt: Any) -> bool:
        prompt = _plain(prompt)
        several = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes, bytearray))
        return several and not (prompt and isinstance(prompt[0], (Integral, Mapping)))

    def _hears(self, keys: Mapping[str, Any]) -> bool:
        """Whether the encoder gets something else than text."""
        return self.adapter.spec.is_encoder_decoder and not keys.keys().isdisjoint(HEARD)

    def plan(self, prompt: Any = "", **keys: Any) -> Pipeline:
        """The pipeline of a call, without running it."""
        if taken := keys.keys() & {"inputs", "tokenizer"}:
            raise InputError(f"{', '.join(taken)}: an LM takes the prompt first, and has the tokenizer given to load()")
        rows = [self.tokens(item) for item in prompt] if self._many(prompt) else None
        if rows is None and not (isinstance(prompt, str) and not prompt and self._hears(keys)):
            rows = [self.tokens(prompt)]
        return plan(self.adapter, rows, tokenizer=self._tokenizer, **keys)

    def generate(self, prompt: Any = "", **keys: Any) -> Any:
        """Continue a text, a list of texts, or chat messages; returns the new text, or a list of texts ([] for none).

        A stop string ends the text and is not part of it. Keys are those of `decodekit.generate`; with
        ``num_return_sequences`` the result is a list, the sequences of one prompt next to each other.
        """
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and not prompt:
            return []
        texts, _ = self._details(prompt, True, keys)
        return texts if self._many(prompt) or len(texts) > 1 else texts[0]

    @outside_graphs
    def details(self, prompt: Any = "", **keys: Any) -> tuple[list[str], GenerateDecoderOnlyOutput]:
        """The texts of all rows, with the output object (tokens, stop reasons, scores where asked for)."""
        return self._details(prompt, False, keys)

    def _details(self, prompt: Any, only: bool, keys: dict[str, Any]) -> tuple[list[str], GenerateDecoderOnlyOutput]:
        pipeline = self.plan(prompt, **keys)
        if only:
            self.only_text(pipeline)
        run = Run(pipeline)
        for _ in run:
            pass
        output = run.output()
        return self.texts(run, output), output

    @staticmethod
    def only_text(pipeline: Pipeline) -> None:
        """Raise `InputError` where the caller asked for outputs beside the text, which nobody would get."""
        asked = [value for value in pipeline.settings.values.values() if value.key in RECORDED and value.value]
        asked = [value for value in asked if value.origin in CALLER]
        if asked:
            words = ", ".join(value.key for value in asked)
            raise InputError(f"{words}: this gives text only; LM.details(...) gives the output object beside it")

    def texts(self, run: Run, output: GenerateDecoderOnlyOutput) -> list[str]:
        """The new texts of a run of this model's pipeline, as far as it got: `output` is what it gave."""
        texts, each = [], run.rows // len(output.sequences)  # of the rows of a prompt, fewer may be returned
        for row, new in enumerate(output.sequences[:, output.prompt_width :].tolist()):
            pieces = self._pieces(run, row * each)
            texts.append(pieces.push(new[: output.lengths[row]]) + pieces.finish())
        return texts

    def _pieces(self, run: Run, row: int = 0) -> TextPieces:
        return row_pieces(self.tokenizer, run.context, row, run.pipeline.settings.get("stop_strings") or ())

    @outside_graphs
    def stream(self, prompt: Any = "", **keys: Any) -> Iterator[str]:
        """Yield the new text of one prompt piece by piece; joined, the pieces are what `generate` returns.

        Closing the iterator cancels the run.
        """
        if self._many(prompt):
            raise InputError("stream takes one prompt; for several use generate, or decodekit.stream for tokens")
        run = Run(self.plan(prompt, **keys))
        if run.pipeline.settings.of(Choices).num_return_sequences > 1:
            raise InputError("stream gives one text; num_return_sequences must be 1")
        self.only_text(run.pipeline)
        run.listened = True
        return self._stream(run)

    def _stream(self, run: Run) -> Iterator[str]:
        pieces = self._pieces(run)
        for step in run:
            new = step.tokens if step.settled is None else step.settled
            if text := pieces.push(new.reshape(-1).tolist()):
                yield text
        if tail := pieces.finish():
            yield tail

    def __repr__(self) -> str:
        return f"LM({type(self.model).__name__} through {type(self.adapter).__name__})"


def _plain(prompt: Any) -> Any:
    """Tensors and arrays of ids as lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt
