"""Whisper's processors next to transformers' own: on random inputs, step by step, and inside its generate."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decodekit import ConfigError, GenerationConfig
from decodekit.context import BindContext
from decodekit.converter import plain, structure
from decodekit.settings import resolve
from decodekit.testing import ProcessorContract
from decodekit.testing.support import context
from decodekit_processors.families.whisper import WhisperNoSpeechDetection, WhisperTimeStampLogitsProcessor
from torch import Tensor

reference = pytest.importorskip("transformers.generation.logits_process")

VOCAB, MARK, EOS = 60, 40, 31


def config(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"no_timestamps_token_id": MARK, "eos_token_id": EOS, "bos_token_id": 7, **more})


def history(rows: int, width: int, seed: int) -> Tensor:
    """Tokens of which half are timestamps, so that every pattern of the last two occurs."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MARK, (rows, width), generator=random)
    stamps = torch.randint(MARK + 1, VOCAB, (rows, width), generator=random)
    return stamps.where(torch.rand(rows, width, generator=random) < 0.5, ids)


def scores(rows: int, seed: int, scale: float) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, VOCAB, generator=random) * scale
    return made.masked_fill(torch.rand(rows, VOCAB, generator=random) < 0.2, -torch.inf)


def agree(got: Tensor, want: Tensor, given: Tensor) -> None:
    """Equal, but for rows where float32 cannot tell all timestamps from the best other token."""
    off = (got != want).any(-1)
    for row in off.nonzero()[:, 0].tolist():
        whole = given[row].clone()
        whole[MARK] = -torch.inf
        whole[(got[row] == -torch.inf) & (want[row] == -torch.inf)] = -torch.inf
        gap = whole[MARK + 1 :].logsumexp(-1) - whole[:MARK].amax()
        assert gap.abs() < 1e-5, f"row {row} differs"


@pytest.mark.parametrize("detect", [None, True, False])
@pytest.mark.parametrize("cap", [None, 0, 3])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 9])
def test_timestamps_on_random_tokens(detect: bool | None, cap: int | None, width: int) -> None:
    changed = 0
    for seed, begin in itertools.product(range(2), sorted({0, max(width - 2, 0), max(width - 1, 0), width, width + 2})):
        made = config(max_initial_timestamp_index=cap)
        ours = WhisperTimeStampLogitsProcessor(made, begin, _detect_timestamp_from_logprob=detect)
        theirs = reference.WhisperTimeStampLogitsProcessor(made, begin, _detect_timestamp_from_logprob=detect)
        for scale in (0.1, 1, 3, 10):
            ids, given = history(64, width, seed), scores(64, seed, scale)
            before = given.clone()
            got = ours(ids, given)
            agree(got, theirs(ids, given.clone()), given)
            assert torch.equal(given, before), "scores were written to"
            changed += int((got != given).sum())
    assert changed > 1000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_timestamps_keep_the_dtype(dtype: torch.dtype) -> None:
    ours = WhisperTimeStampLogitsProcessor(config(), 2)
    theirs = reference.WhisperTimeStampLogitsProcessor(config(), 2)
    for seed in range(20):
        ids, given = history(8, 6, seed), scores(8, seed, 3).to(dtype)
        got = ours(ids, given)
        assert got.dtype == dtype
        agree(got, theirs(ids, given), given.float())


@pytest.mark.parametrize("begin", [None, 3, 0])
@pytest.mark.parametrize("detect", [True, False])
def test_timestamps_step_by_step_as_generate_calls_them(begin: int | None, detect: bool) -> None:
    """Every step takes a random token that is still allowed; later some tokens are taken back and rows trade places."""
    made = config(max_initial_timestamp_index=4)
    for seed in range(6):
        prompt = history(16, 3, seed)
        ours = WhisperTimeStampLogitsProcessor(made, begin, detect)
        theirs = reference.WhisperTimeStampLogitsProcessor(made, 3 if begin is None else begin, detect)
        ctx = context(prompt, vocab_size=VOCAB, capacity=64)
        runtime = ours.bind(ctx)
        random = torch.Generator().manual_seed(seed)
        for step in range(30):
            given = torch.randn(16, VOCAB, generator=random) * 2
            got, want = runtime(ctx.input_ids, given), theirs(ctx.input_ids, given.clone())
            agree(got, want, given)
            new = want.softmax(-1).nan_to_num(1 / VOCAB).multinomial(1, generator=random)[:, 0]
            ctx.tokens[:, ctx.length] = new
            ctx.length += 1
            runtime.accept(new, None)
            if step % 7 == 6:
                ctx.length -= 2
                runtime.rollback(2)
            if step % 5 == 4:
                rows = torch.randint(0, 16, (16,), generator=random)
                ctx.reorder(rows)
                runtime.reorder(rows)


def test_several_accepted_tokens_count_one_by_one() -> None:
    ids = history(8, 9, 1)
    given = scores(8, 1, 1)
    options = WhisperTimeStampLogitsProcessor(config())
    ctx = context(ids[:, :4], vocab_size=VOCAB)
    runtime = options.bind(ctx)
    runtime(ctx.input_ids, given)
    ctx.tokens[:, 4:9] = ids[:, 4:]
    ctx.length = 9
    runtime.accept(ids[:, 4:], None)
    assert torch.equal(runtime(ctx.input_ids, given), attrs_begin(options, 4)(ids, given))
    only = torch.tensor([6, 1])
    runtime.accept(torch.tensor([VOCAB - 1, VOCAB - 1]), only)
    ids = ids.clone()
    ids[only, -3] = VOCAB - 1  # the newest timestamp of these rows, where the last two are none
    ids[only, -2:] = 5
    ctx.tokens[:, :9] = ids
    assert torch.equal(runtime(ctx.input_ids, given)[only], attrs_begin(options, 4)(ids, given)[only])


def attrs_begin(options: WhisperTimeStampLogitsProcessor, begin: int) -> WhisperTimeStampLogitsProcessor:
    return WhisperTimeStampLogitsProcessor(options.generate_config, begin)


def test_what_timestamps_need_comes_from_the_models_file() -> None:
    model = {"no_timestamps_token_id": MARK, "max_initial_timestamp_index": 2, "eos_token_id": EOS}
    settings = resolve([("model", model), ("call", {"processors": {"whisper_timestamps": {}}})])
    (options,) = [active.options for active in settings.kind("processors") if active.plugin.name.startswith("whisper")]
    ctx = context(history(2, 3, 0), vocab_size=VOCAB, eos=(EOS,))
    with pytest.raises(ValueError, match="no_timestamps_token_id is needed"):
        options.bind(ctx)
    ctx.settings = settings
    given = scores(2, 0, 1)
    want = WhisperTimeStampLogitsProcessor(config(max_initial_timestamp_index=2), 3)
    assert torch.equal(options.bind(ctx)(ctx.input_ids, given), want(ctx.input_ids, given))
    # What the options say wins over the model's file.
    told = WhisperTimeStampLogitsProcessor({"no_timestamps_token_id": MARK - 1}).bind(ctx)
    assert told(ctx.input_ids, given)[0, MARK - 1] == -torch.inf


def test_timestamps_say_what_is_missing_or_wrong() -> None:
    ids, given = history(2, 3, 0), scores(2, 0, 1)
    with pytest.raises(ValueError, match="begin_index is needed"):
        WhisperTimeStampLogitsProcessor(config())(ids, given)
    with pytest.raises(ValueError, match="eos_token_id is needed"):
        WhisperTimeStampLogitsProcessor({"no_timestamps_token_id": MARK}, 1)(ids, given)
    with pytest.raises(ValueError, match="outside the vocabulary of 37"):
        WhisperTimeStampLogitsProcessor(config()).bind(context(ids))
    with pytest.raises(ValueError, match="max_initial_timestamp_index must be a whole number"):
        WhisperTimeStampLogitsProcessor(config(max_initial_timestamp_index=-1), 1)
    with pytest.raises(ConfigError, match="begin_index: must be at least 0"):
        GenerationConfig(processors={"whisper_timestamps": {"begin_index": -1}}).validate()


def test_an_end_token_among_or_behind_the_timestamps_is_no_word() -> None:
    """transformers forbids every token below it then, the second timestamp of a pair included."""
    opened = torch.tensor([[5, MARK + 3]])
    for eos in (VOCAB - 1, [VOCAB - 1, VOCAB - 2]):
        got = WhisperTimeStampLogitsProcessor(config(eos_token_id=eos), 0)(opened, torch.zeros(1, VOCAB))
        assert (got[0] > -torch.inf).nonzero()[:, 0].tolist() == list(range(MARK + 3, VOCAB))
    several = WhisperTimeStampLogitsProcessor(config(eos_token_id=[35, EOS]), 0, False)(opened, torch.zeros(1, VOCAB))
    assert (several[0, :MARK] > -torch.inf).nonzero()[:, 0].tolist() == list(range(EOS, MARK))


def test_options_are_data() -> None:
    options = WhisperTimeStampLogitsProcessor(config(eos_token_id=[1, 2]), 3, False)
    assert structure(plain(options), type(options)) == options
    options.set_begin_index(9)
    assert options == WhisperTimeStampLogitsProcessor(config(eos_token_id=[1, 2]), 3, False)
    silent = WhisperNoSpeechDetection(5, 1)
    silent(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 9))
    assert plain(silent) == {"no_speech_token": 5, "begin_index": 1, "scores_is_logprobs": False}
    assert structure(plain(silent), type(silent)) == silent == WhisperNoSpeechDetection(5, 1)


# -- no speech ---------------------------------------------------------------------------------------


class TestNoSpeech(ProcessorContract):
    """The suite, but for scores: they stay as they are."""

    def make(self) -> Any:
        return WhisperNoSpeechDetection(5, 1)

    def test_it_acts(self) -> None:
        options = self.make()
        given = self.cases()["random"]
        runtime = options.bind(self.context(self.tokens()[:, :6], None))
        assert runtime(self.tokens()[:, :6], given) is given
        assert torch.equal(options.no_speech_prob, given.softmax(-1)[:, 5])
        assert torch.equal(runtime.no_speech_prob, options.no_speech_prob)
        runtime(self.tokens()[:, :7], -given)
        assert torch.equal(options.no_speech_prob, given.softmax(-1)[:, 5]), "only the first step is looked at"


@pytest.mark.parametrize("logprobs", [False, True])
def test_no_speech_on_random_scores(logprobs: bool) -> None:
    for seed in range(50):
        ours, theirs = WhisperNoSpeechDetection(7, 1, logprobs), reference.WhisperNoSpeechDetection(7, 1, logprobs)
        assert ours.no_speech_prob == theirs.no_speech_prob == [0.0]
        given = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
        for width, moved in ((2, None), (1, None), (4, 4), (5, None)):
            for processor in (ours, theirs):
                if moved:
                    processor.set_begin_index(moved)
                assert processor(history(8, width, 0), given + width) is not None
            assert torch.equal(torch.as_tensor(ours.no_speech_prob), torch.as_tensor(theirs.no_speech_prob))


class _Model:
    """Logits that say at which place they stand."""

    def forward(self, input_features: Tensor, decoder_input_ids: Tensor) -> Any:
        steps = torch.arange(decoder_input_ids.shape[1])
        noise = torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(input_features[0, 0])))
        return SimpleNamespace(logits=(steps[None, :, None] + input_features[:, :1, None]) * noise)

    __call__ = forward

    def prepare_inputs_for_generation(self, input_ids: Tensor, **_: Any) -> dict[str, Any]:
        return {"decoder_input_ids": input_ids, "input_ids": input_ids}


@pytest.mark.parametrize("prompt", [3, 6])
def test_no_speech_where_the_transcript_starts_inside_the_prompt(prompt: int) -> None:
    ours, theirs = WhisperNoSpeechDetection(7, 3), reference.WhisperNoSpeechDetection(7, 3)
    ids, given = history(4, prompt, 0), scores(4, 0, 1)
    for processor in (ours, theirs):
        processor.set_model(_Model())
        processor.set_inputs({"inputs": torch.rand(4, 2), "input_ids": ids} | {"inputs": torch.arange(8.0).view(4, 2)})
        processor.set_begin_index(prompt)
        processor(ids, given)
    assert torch.equal(ours.no_speech_prob, theirs.no_speech_prob)
    # In a run the width of the prompt is known.
    found = ours.no_speech_prob
    again = WhisperNoSpeechDetection(7, 3)
    again.set_model(_Model())
    again.set_inputs({"inputs": torch.arange(8.0).view(4, 2), "input_ids": ids})
    again.bind(context(ids, vocab_size=VOCAB))(ids, given)
    assert torch.equal(again.no_speech_prob, found)


def test_no_speech_asks_the_model_of_the_run() -> None:
    class Adapter:
        def forward(self, tokens: Tensor, positions: Tensor, cache: Any, /, *, mask: Any, last: int) -> Any:
            assert cache is None
            assert last == tokens.shape[1]
            one_hot = torch.nn.functional.one_hot(tokens, VOCAB)
            return SimpleNamespace(logits=one_hot * (positions[..., None] + 1.0))

    ids = torch.tensor([[0, 9, 8, 7], [9, 8, 7, 6], [9, 8, 7, 6]])
    mask = torch.tensor([[False, True, True, True], [True] * 4, [True] * 4])
    for begin, starts in ((None, [(9, 1), (9, 1), (9, 1)]), (2, [(8, 2), (7, 3), (7, 3)])):
        ctx: BindContext = context(ids, mask, vocab_size=VOCAB, model=Adapter())
        options = WhisperNoSpeechDetection(9, begin)
        options.bind(ctx)(ids, torch.zeros(3, VOCAB))
        logits = torch.stack([torch.nn.functional.one_hot(torch.tensor(t), VOCAB) * float(p) for t, p in starts])
        assert torch.allclose(options.no_speech_prob, logits.softmax(-1)[:, 9])
        shared: BindContext = context(ids, mask, vocab_size=VOCAB, model=Adapter())
        shared.slots = (0, 1, 1)
        options.bind(shared)(ids, torch.zeros(3, VOCAB))
        assert torch.allclose(options.no_speech_prob, logits.softmax(-1)[:2, 9]), "one answer for each prompt"
    with pytest.raises(ValueError, match="give set_model and set_inputs"):
        WhisperNoSpeechDetection(9, 2).bind(context(ids, vocab_size=VOCAB))
    with pytest.raises(ValueError, match="give set_model and set_inputs"):
        WhisperNoSpeechDetection(9, 2)(ids[:, :2], torch.zeros(3, VOCAB))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        WhisperNoSpeechDetection(VOCAB, 1).bind(context(ids, vocab_size=VOCAB))
    with pytest.raises(ValueError, match="begin_index is needed"):
        WhisperNoSpeechDetection(9)(ids, torch.zeros(3, VOCAB))


# -- inside transformers' generate -------------------------------------------------------------------


def _tiny(multilingual: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = {"num_mel_bins": 8, "d_model": 16, "max_source_positions": 30, "max_target_positions": 40, "init_std": 1.0}
    shape |= {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in PARTS.items()}
    special = {"eos_token_id": 84, "bos_token_id": 84, "pad_token_id": 84, "decoder_start_token_id": 85}
    off = {"suppress_tokens": None, "begin_suppress_tokens": None}
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(vocab_size=120, **shape, **special, **off)
    ).eval()
    told = model.generation_config
    told.no_timestamps_token_id, told.is_multilingual, told.max_initial_timestamp_index = 98, multilingual, 3
    if multilingual:
        told.lang_to_id, told.task_to_id = {"<|en|>": 86, "<|de|>": 87}, {"transcribe": 90, "translate": 91}
    return model


PARTS = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}


@pytest.mark.parametrize("multilingual", [False, True])
def test_inside_whispers_own_generate(multilingual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long audio, earlier text as a prompt, falling back to other temperatures: the same tokens with our classes."""
    module = pytest.importorskip("transformers.models.whisper.generation_whisper")
    model = _tiny(multilingual)
    features = torch.randn(2, 8, 150, generator=torch.Generator().manual_seed(3))
    told: dict[str, Any] = {"language": "en", "task": "transcribe"} if multilingual else {}
    told |= {"return_timestamps": True, "max_new_tokens": 15, "temperature": (0.0, 0.6), "no_speech_threshold": 0.01}
    told |= {"condition_on_prev_tokens": True, "logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}

    def run() -> tuple[Tensor, list[float]]:
        seen: list[float] = []
        detection = module.WhisperNoSpeechDetection
        original = module.WhisperGenerationMixin._need_fallback

        def spy(self: Any, sequence: Any, outputs: Any, index: int, processors: Any, *rest: Any) -> Any:
            (found,) = [item.no_speech_prob for item in processors if isinstance(item, detection)]
            seen.extend(torch.as_tensor(found).tolist())
            return original(self, sequence, outputs, index, processors, *rest)

        torch.manual_seed(5)
        with monkeypatch.context() as patch:
            patch.setattr(module.WhisperGenerationMixin, "_need_fallback", spy)
            return model.generate(features, attention_mask=torch.ones(2, 150), **told), seen

    want, silence = run()
    calls: list[int] = []

    class Timestamps(WhisperTimeStampLogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
            calls.append(input_ids.shape[1])
            return WhisperTimeStampLogitsProcessor.__call__(self, input_ids, scores)

    monkeypatch.setattr(module, "WhisperTimeStampLogitsProcessor", Timestamps)
    monkeypatch.setattr(module, "WhisperNoSpeechDetection", WhisperNoSpeechDetection)
    got, heard = run()
    assert len(calls) > 20
    assert torch.equal(got, want)
    assert (want > 98).sum() > 4, "no timestamps were made, so nothing was tested"
    assert heard == silence
    assert len(set(heard)) > 1
