"""The demo, small enough for a test: what it claims holds."""

import ast
import importlib.util
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from examples.gpt.data import Corpus
from examples.gpt.fp8_cache import calibrate, loss_through_cache
from examples.gpt.generate import generate, printable
from examples.gpt.measure import Point, flash_attention, standard_attention, sweep
from examples.gpt.model import GPT, GPTConfig, Packed
from examples.gpt.schedule import Schedule
from examples.serve import Engine, Request, serve
from tests.commands import ROOT, run

CPU = torch.device("cpu")
PROGRAMS = sorted(path.name for path in (ROOT / "examples").glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def corpus():
    return Corpus(tokens_per_batch=512, max_seqlen=128)


def small_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(dim=64, layers=2, heads=4, heads_kv=2, hidden=128, max_seqlen=256))


def test_batches_are_packed_and_targets_are_the_next_bytes(corpus):
    batch = corpus.batch()
    assert len(batch.tokens) == len(batch.targets) == batch.cu_seqlens[-1] == 512
    lengths = batch.cu_seqlens.diff()
    assert lengths.max() == batch.max_seqlen <= 128
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()):
        assert torch.equal(batch.tokens[start + 1 : end], batch.targets[start : end - 1])


def test_held_out_files_are_not_trained_on(corpus):
    assert not set(corpus.held_out) & set(corpus.train)
    again = Corpus(tokens_per_batch=512, max_seqlen=128)
    first, second = corpus.held_out_batches(1)[0], again.held_out_batches(1)[0]
    assert torch.equal(first.tokens, second.tokens)


def train(model, corpus, steps):
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        batch = corpus.batch()
        loss = torch.nn.functional.cross_entropy(model(batch), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained():
    """So far that what it attends to matters."""
    model = small_model()
    train(model, Corpus(tokens_per_batch=512, max_seqlen=128), 40)
    return model


def test_training_lowers_the_loss(corpus):
    losses = train(small_model(), corpus, 15)
    assert losses[-1] < losses[0] - 1


def test_a_sequence_does_not_see_its_neighbours(corpus):
    model, batch = small_model(), corpus.batch()
    start = int(batch.cu_seqlens[1])
    before = model(batch)
    batch.tokens[:start] = 0
    after = model(batch)
    torch.testing.assert_close(after[start:], before[start:])
    assert not torch.allclose(after[:start], before[:start])


def test_generation_with_the_cache_equals_recomputing():
    model = small_model()
    cached = generate(model, b"def f(", 20, dtype=torch.float32)
    recomputed = generate(model, b"def f(", 20, dtype=torch.float32, use_cache=False)
    assert cached.text == recomputed.text
    assert len(cached.text) == 20
    torch.testing.assert_close(cached.logits, recomputed.logits, rtol=1e-4, atol=1e-4)


def test_a_cache_in_8_bits_costs_less_than_half_a_percent_of_loss(trained, corpus):
    scales = calibrate(trained, corpus.rows(8, 128, held_out=False), torch.float32)
    texts = corpus.rows(8, 129, held_out=True)

    def loss(scales=None):
        cache = trained.new_cache(8, torch.float32, scales)
        assert cache[0].k.element_size() == (4 if scales is None else 1)
        return loss_through_cache(trained, texts, cache, prompt=64)

    plain = loss()
    assert 0 < abs(loss(scales) / plain - 1) < 0.005
    # These texts do show what descales are worth: 50 times too small, and most numbers saturate.
    for layer in scales:
        layer.margin = 1 / 50
    assert abs(loss(scales) / plain - 1) > 0.02


def test_loss_through_the_cache_is_that_of_all_tokens_at_once(trained, corpus):
    texts = corpus.rows(3, 65, held_out=True)
    tokens, targets = texts[:, :-1].flatten(), texts[:, 1:].flatten()
    starts = torch.arange(0, 4 * 64, 64, dtype=torch.int32)
    logits = trained(Packed(tokens, targets, starts, 64))
    at_once = torch.nn.functional.cross_entropy(logits, targets).item()
    through = loss_through_cache(trained, texts, trained.new_cache(3, torch.float32), prompt=10)
    assert through == pytest.approx(at_once, rel=1e-5)


def test_generation_with_8_bits_has_nearly_the_same_logits(trained, corpus):
    scales = calibrate(trained, corpus.rows(8, 128, held_out=False), torch.float32)
    plain = generate(trained, b"def f(", 20, dtype=torch.float32)
    coded = generate(trained, b"def f(", 20, dtype=torch.float32, scales=scales)
    assert len(coded.text) == 20
    error = (coded.logits[0] - plain.logits[0]).norm() / plain.logits[0].norm()
    assert 0 < error < 0.05


def test_the_demo_says_what_8_bits_cost(trained, corpus, capsys):
    pytest.importorskip("matplotlib")
    from examples.train_gpt import calibrated, show_cost_of_8_bits

    trainer = SimpleNamespace(
        model=trained, corpus=corpus, device=CPU, autocast=nullcontext(),
        args=SimpleNamespace(seqlen=32),
    )  # fmt: skip
    show_cost_of_8_bits(trainer, torch.float32, calibrated(trainer, torch.float32))
    number = r"\d\.\d{4}"
    line = rf"Loss through the cache: {number}; with eight bits {number} \([+-]0\.\d\d%\)\n"
    assert re.fullmatch(line, capsys.readouterr().out)


@pytest.mark.parametrize("pages", [9, 100])
def test_serving_writes_what_is_written_one_by_one(pages, capsys):
    """With room for all requests at once, and with so little that some are evicted."""
    model = small_model()
    texts = [b"def f(", b"class A:\n    def __init__(self", b"import os", b"x" * 40, b"return "]
    requests = [Request(text, new_tokens=10 + 3 * i) for i, text in enumerate(texts)]
    engine = Engine(model, pages, page_size=8, dtype=torch.float32, budget=16)
    assert serve(engine, requests) > 0
    assert (engine.evictions > 0) == (pages == 9)
    assert sorted(engine.free) == list(range(pages))
    for request in requests:
        alone = generate(model, request.prompt, request.new_tokens, dtype=torch.float32)
        assert request.text == alone.text
    assert "token" in capsys.readouterr().err
    with pytest.raises(ValueError, match="pages"):
        engine.add(Request(b"x" * 800, 1))


def test_sampling_repeats_with_its_seed():
    model = small_model()
    first, again, other = (
        generate(model, b"x", 20, dtype=torch.float32, temperature=1.0, seed=s).text
        for s in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_flash_memory_grows_linearly_and_standard_memory_with_the_square():
    flash = sweep(flash_attention, [512, 2048], CPU, torch.float32, heads=1)
    standard = sweep(standard_attention, [512, 2048], CPU, torch.float32, heads=1)
    assert flash[1].megabytes < 8 * flash[0].megabytes
    assert standard[1].megabytes > 12 * standard[0].megabytes


@pytest.mark.parametrize(
    "losses", [[(0.1, 3.0), (0.2, 2.0)], [(0.1, 5.6)], [(0.1, 5.6), (0.2, 5.5)]]
)
def test_plot(tmp_path, monkeypatch, losses):
    """Also of a machine so slow that there were a step or two, of an untrained model."""
    figures = pytest.importorskip("matplotlib.figure")
    from examples.gpt.plot import plot

    drawn = []
    save = figures.Figure.savefig
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda f, *args, **how: [drawn.append(f), save(f, *args, **how)]
    )
    points = [Point(256, 10.0, 3.0), Point(512, 1500.0, 2000.0)]
    sweeps = {"flash_attn": points, "standard": points[:1]}
    plot(tmp_path / "demo.png", losses, [(0.1, 5.7)], sweeps, "a machine")
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    panels = drawn[0].axes
    bottom, top = panels[0].get_ylim()
    assert bottom < min(loss for _, loss in losses) < 5.7 < top
    assert all(panel.get_xlabel() and "lower is better" in panel.get_ylabel() for panel in panels)


@pytest.mark.parametrize(("step", "evaluation", "most"), [(0.1, 0.2, 10), (9.0, 25.0, 1)])
def test_evaluations_leave_the_time_to_training(step, evaluation, most):
    """On a fast machine ten of them; on a slow one no more than a tenth of the time."""
    schedule, now, count = Schedule(75), 0.0, 0
    while now < 75:
        now += step
        if schedule.is_due(now):
            schedule.took(now, evaluation)
            now += evaluation
            count += 1
    assert count in (most, most - 1)


def test_what_a_model_writes_moves_no_cursor():
    assert printable(b"a\tb\n") == "a\tb\n"
    assert printable(b"\x1b[2J\x00\x7f\r\xff") == "\ufffd[2J" + 4 * "\ufffd"
    assert printable("é".encode()) == "é"


# --- The programs ---------------------------------------------------------------------------------


def test_the_index_has_every_program():
    text = (ROOT / "examples" / "README.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+\.py)\]", text, re.MULTILINE)) == sorted(
        set(PROGRAMS) - {"__init__.py"}
    )


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "__init__.py"])
def test_a_program_runs_from_anywhere(name, tmp_path):
    """Those with options say what they do; the others are done in a moment."""
    path = ROOT / "examples" / name
    if "matplotlib" in path.read_text() and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("no matplotlib")
    has_options = "parse_args()" in path.read_text()
    done = run(sys.executable, path, *["--help"] * has_options, cwd=tmp_path)
    if has_options:
        summary = ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]
        assert summary.endswith(".")
        assert summary in " ".join(done.stdout.split())
