"""A stored prompt is continued from as if it had been run, by other processes too, and no other one is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, load, plan, stream
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from safetensors import safe_open
from safetensors.torch import load_file, save_file

PREFIX = [5, 9, 33, 17, 8, 21, 4, 30]
QUIET: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}


def native(seed: int = 0, **more: Any) -> NativeLM:
    torch.manual_seed(seed)
    model = NativeLM(NativeConfig(71, 32, 48, 2, 4, 2, 8, max_position_embeddings=512, **more)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model.requires_grad_(False)


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.25)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(params=[native, llama])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompt.safetensors"


def store(model: Any, path: Path, prompt: Any = None, **keys: Any) -> Any:
    return generate(model, [PREFIX] if prompt is None else prompt, prompt_cache=str(path), **{**QUIET, **keys})


def fed(model: Any, prompt: Any, path: Path, **keys: Any) -> tuple[list[int], Any]:
    """How many columns each forward pass got, and the output with its logits."""
    pipeline = plan(model, prompt, prompt_cache=str(path), **{**QUIET, **keys})
    forward, widths = pipeline.adapter.forward, []

    def watch(tokens: Any, *args: Any, **more: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(tokens, *args, **more)

    from decodekit import Run

    pipeline.adapter.forward = watch
    run = Run(pipeline)
    for _ in run:
        pass
    return widths, run.output()


def same(model: Any, prompt: Any, path: Path, columns: int, **keys: Any) -> None:
    """The run from the file gives what a run from scratch gives, and reads only `columns` of the prompt."""
    keys = {"output_logits": True, **keys}
    widths, mine = fed(model, prompt, path, **keys)
    whole: Any = generate(model, prompt, **{**QUIET, **keys, "return_dict_in_generate": True})
    assert widths[0] == columns
    assert torch.equal(mine.sequences, whole.sequences)
    for one, other in zip(mine.logits, whole.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


# -- continuing ---------------------------------------------------------------------------------------


def test_storing_changes_nothing(model: Any, path: Path) -> None:
    assert torch.equal(store(model, path), generate(model, [PREFIX], **QUIET))
    assert path.exists()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_same_prompt_reads_its_last_token_only(model: Any, path: Path) -> None:
    store(model, path)
    before = path.read_bytes()
    same(model, [PREFIX], path, 1)
    assert path.read_bytes() == before


def test_a_longer_prompt_reads_the_rest(model: Any, path: Path) -> None:
    store(model, path, max_new_tokens=1)
    same(model, [[*PREFIX, 40, 41, 42]], path, 3)
    same(model, [[*PREFIX, 7]], path, 1)


def test_one_prefix_begins_every_row_of_a_padded_batch(model: Any, path: Path) -> None:
    store(model, path)
    prompts = [[*PREFIX, 40, 41, 42, 43, 44], [*PREFIX, 7], [*PREFIX, 50, 51]]
    same(model, prompts, path, 5)
    same(model, [[*PREFIX, 3], [*PREFIX, 7]], path, 1)


def test_a_padded_batch_is_stored_and_continued(model: Any, path: Path) -> None:
    rows = [PREFIX, PREFIX[:3], PREFIX[2:7]]
    store(model, path, rows)
    same(model, rows, path, 1)
    same(model, [[*row, 60, 61] for row in rows], path, 2)
    # Other padding than before: what was stored moves to other columns.
    same(model, [[*rows[0], 1], [*rows[1], 2, 3, 4, 5, 6, 7, 8, 9], [*rows[2], 3, 4]], path, 8)
    same(model, [[*rows[0]], [*rows[1], 2, 3, 4, 5], [*rows[2], 3]], path, 4)


def test_right_padded_tensors(model: Any, path: Path) -> None:
    store(model, path)
    tokens = torch.tensor([[*PREFIX, 40, 41], [*PREFIX, 7, 0]])
    same(model, tokens, path, 2, attention_mask=torch.tensor([[1] * 10, [1] * 9 + [0]]))


@pytest.mark.parametrize("keys", [{"num_beams": 3}, {"do_sample": True, "seed": 4}], ids=str)
def test_other_ways_of_decoding(model: Any, path: Path, keys: dict[str, Any]) -> None:
    store(model, path, num_beams=3)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("tokens").tolist() == [PREFIX]
    prompt = [[*PREFIX, 40, 41], [*PREFIX, 7, 8]]
    mine = generate(model, prompt, prompt_cache=str(path), **{**QUIET, **keys})
    assert torch.equal(mine, generate(model, prompt, **{**QUIET, **keys}))


def test_several_sequences_of_a_prompt(model: Any, path: Path) -> None:
    keys: dict[str, Any] = {"do_sample": True, "seed": 4, "num_return_sequences": 3}
    store(model, path, [PREFIX, PREFIX[:4]], **keys)
    prompts = [[*PREFIX, 3], [*PREFIX[:4], 9]]
    mine = generate(model, prompts, prompt_cache=str(path), **{**QUIET, **keys})
    assert torch.equal(mine, generate(model, prompts, **{**QUIET, **keys}))


def test_a_prompt_read_in_chunks(model: Any, path: Path) -> None:
    store(model, path, prefill_chunk_size=3)
    same(model, [[*PREFIX, 40, 41, 42, 43, 44, 45, 46]], path, 7)


def test_a_stream_closed_early_has_stored_its_prompt(model: Any, path: Path) -> None:
    steps = stream(model, [PREFIX], prompt_cache=str(path), **QUIET)
    next(iter(steps))
    steps.close()
    same(model, [[*PREFIX, 40]], path, 1)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_caches_are_stored_packed(model: Any, path: Path, bits: int) -> None:
    keys: dict[str, Any] = {
        "cache_implementation": "quantized",
        "cache_config": {"nbits": bits, "residual_length": 8, "q_group_size": 8},
    }
    prompt = [torch.randint(3, 71, (60,), generator=torch.Generator().manual_seed(1)).tolist()]
    store(model, path, prompt, **keys)
    names = load_file(path)
    assert names["state.0.keys.codes"].dtype == torch.uint8
    again = plan(model, [[*prompt[0], 5, 6]], prompt_cache=str(path), **keys)
    assert again.prompt.past == 60
    assert again.cache.get_seq_length() == 60
    assert torch.equal(again.cache.state()["1.values.codes"], names["state.1.values.codes"])
    with pytest.raises(InputError, match=rf"cannot be used: the state is of a quantized cache with nbits {bits}"):
        generate(model, prompt, prompt_cache=str(path), **{**keys, "cache_config": {"nbits": 2, "q_group_size": 8}})
    # Rows padded otherwise are packed once more.
    generate(model, [[*prompt[0], 5, 6], [*prompt[0], 7]], prompt_cache=str(path), **keys)


def test_the_plan_tells_what_is_spared(model: Any, path: Path) -> None:
    assert plan(model, [PREFIX], prompt_cache=str(path)).describe()["prompt_cache"]["columns to run"] == 8
    assert not path.exists()
    store(model, path)
    told = plan(model, [[*PREFIX, 4, 5]], prompt_cache=str(path)).describe()["prompt_cache"]
    assert told == {"file": str(path), "columns read": 8, "columns to run": 2}


# -- refusing -----------------------------------------------------------------------------------------


def refused(words: str, model: Any, path: Path, prompt: Any = None, **keys: Any) -> None:
    with pytest.raises((InputError, ConfigError), match=words):
        store(model, path, prompt, **keys)


def test_another_model_is_refused_by_what_differs(path: Path) -> None:
    store(native(), path)
    refused(r"stored with another weights \(", native(1), path)
    refused(r"stored with another configuration \(", native(rms_norm_eps=1e-5), path)
    refused("another configuration .* model .*LlamaForCausalLM here", llama(), path)
    refused(r"another dtype \(torch.float32 there, torch.bfloat16 here\), weights", native().bfloat16(), path)
    refused(r"another cache \(dynamic there, quantized here\)", native(), path, cache_implementation="quantized")


def test_one_changed_weight_is_seen(path: Path) -> None:
    store(native(), path)
    other = native()
    other.model.layers[1].mlp.gate_up_proj.weight.mul_(1.001)
    refused("another weights", other, path)


def test_another_prompt_is_refused_by_the_place_that_differs(model: Any, path: Path) -> None:
    store(model, path)
    refused(
        "other tokens than prompt 0 begins with: token 3 is 17 there and 50 here", model, path, [[*PREFIX[:3], 50] * 3]
    )
    refused("it has 8 tokens, and this one 4", model, path, [PREFIX[:4]])
    refused("prompt 1 begins with: token 0", model, path, [PREFIX, [1, *PREFIX]])


def test_another_number_of_prompts_is_refused(model: Any, path: Path) -> None:
    store(model, path, [PREFIX, PREFIX[:4]])
    refused("holds 2 prompts, and there are 3", model, path, [[*PREFIX, 4]] * 3)
    refused("holds 2 prompts, and there are 1", model, path)


def test_half_a_file_is_refused(model: Any, path: Path) -> None:
    store(model, path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        refused("is damaged, or was not written to its end", model, path)
    path.write_bytes(whole[:-64] + bytes(64))
    refused("is damaged: its checksum is another", model, path)
    path.write_bytes(whole)
    same(model, [PREFIX], path, 1)


def test_other_files_and_versions_are_refused(model: Any, path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)
    refused("is no stored prompt", model, path)
    path.unlink()
    store(model, path)
    with safe_open(path, "pt") as file:
        told = json.loads(file.metadata()["decodekit.prompt_cache"])
    tensors = load_file(path)
    save_file(tensors, path, metadata={"decodekit.prompt_cache": json.dumps({**told, "version": 99})})
    refused("has version 99 of this format, and this is version 1", model, path)


def test_calls_in_which_it_cannot_act_are_refused(model: Any, path: Path, tmp_path: Path) -> None:
    refused("leave use_cache=False out", model, path, use_cache=False)
    refused("pass only one", model, path, cache=plan(model, [PREFIX]).cache)
    refused("is no folder that may be written to", model, tmp_path / "nowhere" / "file")
    assert not path.exists()


def test_caches_that_cannot_be_stored_are_refused_and_others_named(path: Path) -> None:
    refused(
        "needs cache:store, which ModelCache does not offer; these do: .*dynamic",
        llama(),
        path,
        cache_implementation="model",
    )


def test_a_models_own_file_cannot_name_one(path: Path) -> None:
    model = llama()
    model.generation_config.prompt_cache = str(path)
    with pytest.raises(ConfigError, match="may not name files"):
        generate(model, [PREFIX], **QUIET)
    assert not path.exists()


def test_a_file_that_cannot_be_written_costs_no_text(model: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.warns(UserWarning, match="could not be written: .*No space left"):
        out = store(model, path)
    assert torch.equal(out, generate(model, [PREFIX], **QUIET))
    assert list(path.parent.iterdir()) == []


# -- processes and threads -----------------------------------------------------------------------------

PROGRAM = """
import sys
from decodekit import generate, load, plan
path, prompt = sys.argv[1], [int(token) for token in sys.argv[2].split(",")]
lm = load("bundled")
past = plan(lm, [prompt], prompt_cache=path, max_new_tokens=5).prompt.past
print(past, generate(lm, [prompt], prompt_cache=path, do_sample=False, max_new_tokens=5)[0].tolist())
"""


def process(path: Path, prompt: list[int]) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", PROGRAM, str(path), ",".join(map(str, prompt))]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))


def told(running: subprocess.Popen[str]) -> str:
    out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    return out.strip()


def test_one_process_stores_and_another_goes_on(path: Path) -> None:
    lm = load("bundled")
    whole = generate(lm, [PREFIX], do_sample=False, max_new_tokens=5)[0].tolist()
    assert told(process(path, PREFIX)) == f"0 {whole}"
    longer = [*PREFIX, 11, 12]
    whole = generate(lm, [longer], do_sample=False, max_new_tokens=5)[0].tolist()
    assert told(process(path, longer)) == f"8 {whole}"


def test_writers_at_the_same_time(path: Path) -> None:
    """Each writes a whole file; readers see one or none."""
    model, errors = native(), []
    want = generate(model, [PREFIX], **QUIET)

    def work() -> None:
        try:
            for _ in range(6):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert torch.equal(store(model, path), want)
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # another one took it away between the look and the reading
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store(model, path)
    same(model, [PREFIX], path, 1)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
