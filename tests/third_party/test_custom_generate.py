"""A strategy of another distribution runs in plain transformers, by `custom_generate=`."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_strategy_of_another_distribution_in_transformers(python: Any) -> None:
    pytest.importorskip("transformers")
    result = python(
        """
        import json, torch, transformers, decodekit
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
        # The toy's strategy takes the second-likeliest token; its own key, and the distribution of sharpen, act too.
        loop = decodekit.as_custom_generate("decodekit-toy:toy", toy_limit=4)
        got = model.generate(ids, max_new_tokens=9, eos_token_id=None, pad_token_id=0, custom_generate=loop)
        want = ids
        for _ in range(4):
            want = torch.cat([want, model(want).logits[:, -1].topk(2).indices[:, 1:]], 1)
        drawn = [
            model.generate(ids, max_new_tokens=6, do_sample=True, top_k=0, custom_generate=decodekit.as_custom_generate(
                "sample", sharpen=100.0, seed=seed)).tolist()
            for seed in (1, 2)
        ]
        greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
        width = len(drawn[0][0])
        print(json.dumps([got.tolist(), want.tolist(), drawn, greedy[:, :width].tolist()]))
        """,
        "decodekit-sharpen",
        "decodekit-toy",
    ).json
    got, want, drawn, greedy = result
    assert got == want
    assert drawn == [greedy, greedy], "sharpened so much, the likeliest token is drawn"


def test_a_search_of_another_distribution(python: Any) -> None:
    """Rows that trade places, a processor whose state follows them (Reorders): here by name, and in transformers."""
    pytest.importorskip("transformers")
    code = """
        import json, torch, transformers, decodekit
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, initializer_range=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
        keys = dict(max_new_tokens=7, eos_token_id=None, pad_token_id=0)
        rows = []
        for more in ({}, {"unlike_last": 1.5}, {"unlike_last": 1.5, "use_cache": False}):
            named = decodekit.generate(model, ids, strategy="twins", **keys, **more)
            loop = decodekit.as_custom_generate("twins", **more)
            theirs = model.generate(ids, custom_generate=loop, **keys)
            beams = decodekit.generate(model, ids, num_beams=2, length_penalty=0.0, **keys, **more)
            rows.append([named.tolist(), theirs.tolist(), beams.tolist()])
        print(json.dumps(rows))
        """
    rows = python(code, "decodekit-twins").json
    for named, theirs, beams in rows:
        assert named == theirs == beams
    assert rows[0][0] != rows[1][0], "the penalty changed nothing"
    assert rows[1] == rows[2]


def test_the_twins_keep_what_they_claim(python: Any) -> None:
    verdicts = python(
        """
        import json, warnings
        from decodekit.testing import ProcessorContract, StrategyContract, results
        from decodekit_twins import Twins, UnlikeLast
        warnings.simplefilter("ignore")

        class Processor(ProcessorContract):
            def make(self):
                return UnlikeLast(1.5)

        class Strategy(StrategyContract):
            streams = False
            def make(self):
                return Twins()

        print(json.dumps({**results(Processor()), **results(Strategy())}))
        """,
        "decodekit-twins",
    ).json
    assert {name: verdict for name, verdict in verdicts.items() if verdict not in ("ok", "skipped")} == {}
    assert sum(verdict == "ok" for verdict in verdicts.values()) > 20
