"""Watermarkers, candidate generators and schedulers from outside take the places of the built-ins."""

from __future__ import annotations

from typing import Any


def test_a_watermarker_marks_after_truncation_and_finds_its_mark(python: Any) -> None:
    result = python(
        """
        import json, torch, decodekit
        from decodekit.registry import registry
        from decodekit_toy import EvenMark, Parrot
        seen = []
        def spy(input_ids, scores):
            seen.append(scores.clone())
            return scores
        spy.traits = decodekit.Traits(phase=decodekit.Phase.WATERMARK, before=("toy_mark",), pure=True)
        keys = dict(do_sample=True, top_k=4, seed=5)
        out = decodekit.generate(Parrot(), [[5]], toy_mark=8.0, max_new_tokens=60, logits_processor=[spy],
                                 output_scores=True, return_dict_in_generate=True, **keys)
        plain = decodekit.generate(Parrot(), [[5]], max_new_tokens=60, **keys)
        plan = decodekit.plan(Parrot(), [[5]], toy_mark=8.0, **keys).describe()
        nested = decodekit.plan(Parrot(), [[5]], {"watermarkers": {"toy_mark": {"strength": 8.0}}}, **keys).describe()
        mark = registry.load("watermarkers", "toy_mark")()
        row = next(p for p in plan["processors"] if p["name"] == "toy_mark")
        print(json.dumps({
            "finite": sorted({int((s > -torch.inf).sum()) for s in seen}),
            "after": sorted({int((s > -torch.inf).sum()) for s in out.scores}),
            "p": mark.detect(out.sequences[0, 1:]).p_value,
            "plain": mark.detect(plain[0, 1:]).p_value,
            "row": [row["owner"], row["phase"], row["why"]],
            "names": [p["name"] for p in plan["processors"]],
            "nested": [p["name"] for p in nested["processors"]],
        }))
        """,
        "decodekit-toy",
    ).json
    assert result["finite"] == [4]
    assert result["after"] == [4]
    assert result["p"] < 1e-6
    assert result["plain"] > 0.01
    assert result["row"] == ["decodekit-toy:toy_mark", "WATERMARK", "toy_mark=8.0 (call)"]
    assert result["names"] == result["nested"] == ["top_k", "toy_mark"]


def test_candidates_reach_the_run(python: Any) -> None:
    result = python(
        """
        import json, torch, decodekit
        from decodekit_toy import Parrot

        class Drafted:
            '''Takes a whole draft where the model agrees with all of it, otherwise one token.'''
            needs = frozenset()
            samples = False
            selector = "argmax"
            def decode(self, run):
                (drafter,) = run.candidates
                logits = run.prefill()
                while not run.finished:
                    draft = drafter.propose(run.context.input_ids, 3)
                    first = run.select(run.process(logits))
                    step = run.accept(draft.tokens if bool((draft.tokens[:, 0] == first).all()) else first)
                    drafter.observe((draft.tokens[:, 0] == first).long() * step.tokens.shape[-1], None)
                    yield step
                    if not run.finished:
                        logits = run.forward(step.tokens if step.tokens.dim() == 1 else step.tokens[:, -1])
                seen.append(drafter.learned)

        seen = []
        run = decodekit.plan(Parrot(), [[5], [9]], strategy=Drafted(), toy_guess=2, max_new_tokens=6)
        print(json.dumps({
            "owners": [p.owner for p in run.candidates],
            "out": decodekit.generate(Parrot(), [[5], [9]], strategy=Drafted(), toy_guess=2, max_new_tokens=6).tolist(),
            "learned": seen,
        }))
        """,
        "decodekit-toy",
    ).json
    assert result["owners"] == ["decodekit-toy:toy_guess"]
    assert result["out"] == [[5, 6, 7, 8, 9, 10, 11], [9, 10, 11, 12, 13, 14, 15]]
    assert result["learned"] == [[[2, 2]] * 3]


def test_a_scheduler_keeps_the_protocol(python: Any) -> None:
    result = python(
        """
        import inspect, json
        from types import SimpleNamespace
        from decodekit.protocols import Scheduler
        from decodekit.registry import registry
        queue = registry.load("schedulers", "toy_shortest")()
        members = [n for n, f in vars(Scheduler).items() if inspect.isfunction(f) and not n.startswith("_")]
        missing = [n for n in members if not callable(getattr(queue, n, None))]
        for name, size in (("long", 9), ("short", 1), ("middle", 4), ("gone", 2)):
            queue.add_waiting_request(SimpleNamespace(request_id=name, tokens_to_process=list(range(size))))
        queue.set_request_cancellation("gone")
        log, names = [queue.has_pending_requests()], lambda batch: batch and [s.request_id for s in batch]
        log.append(names(queue.schedule_batch(5, 100)))
        queue.clear_cancelled_requests()
        for name in ("short", "middle"):
            queue.finish_request(name)
        log.append(names(queue.schedule_batch(8, 100)))   # "long" does not fit: None
        log.append(names(queue.schedule_batch(9, 9)))
        queue.finish_request("long")
        log.append(queue.has_pending_requests())
        print(json.dumps([members, missing, log]))
        """,
        "decodekit-toy",
    ).json
    members, missing, log = result
    assert {"add_waiting_request", "schedule_batch", "finish_request"} <= set(members)
    assert missing == []
    assert log == [True, ["short", "middle"], None, ["long"], False]


def test_a_model_plugin_opens_by_name_and_two_claims_of_one_class_clash(python: Any, fake: Any) -> None:
    rival = fake(
        "rival",
        "[decodekit.models]\nrival = rival:Rival\n[decodekit.adapts]\ndecodekit_toy.Parrot = rival\n",
        """
        import decodekit_toy
        class Rival(decodekit_toy.Parrots):
            def adapt(self, model):
                made = super().adapt(model)
                made.defaults = {"toy_limit": 1}
                return made
        """,
    )
    code = """
    import json, decodekit
    from decodekit_toy import Parrot
    keys = dict(strategy="toy")
    seen = [decodekit.generate(decodekit.load("parrot:16"), [[15]], toy_limit=1, **keys).tolist()]
    try:
        seen.append(decodekit.generate(Parrot(), [[5]], **keys).tolist())
    except decodekit.PluginClash as error:
        seen.append(str(error))
    seen.append(decodekit.generate(Parrot(), [[5]], adapter="rival", **keys).tolist())
    print(json.dumps(seen))
    """
    opened, clash, named = python(code, "decodekit-toy", before=[rival]).json
    assert opened == [[15, 1]]
    assert "decodekit-toy:toy" in clash
    assert "rival:rival" in clash
    assert named == [[5, 7]]
    preferred = python(code, "decodekit-toy", before=[rival], DECODEKIT_PREFER="rival").json
    assert preferred[1] == [[5, 7]]
