"""Batches: what every call checks, and what it does about it."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.utils._pytree as pytree
from harness import QUIET, csx, fit, make_trainer
from lightning.pytorch.utilities import CombinedLoader
from models import CLASSES, Classifier, loader, mlp, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import fulgurite
from fulgurite.backends.csx.diagnostics.trace_errors import InputChanged, UnsupportedInput

pytestmark = pytest.mark.fits

X, Y = rows(16).tensors


class Sum(pl.LightningModule):
    """Loss from whatever ``compute`` makes of the batch; no learning rate, so nothing moves."""

    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.compute = compute

    def training_step(self, batch: Any) -> Tensor:
        return self.compute(batch) * self.weight

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def feed(compute: Any, batches: list[Any], **backend: Any) -> list[float]:
    """The losses of a fit over ``batches`` as they are."""
    run = fit(
        lambda: Sum(compute),
        lambda: (DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch),),
        static=True,
        backend=backend,
    )
    return run.losses


def test_a_float64_batch_into_a_float32_program_is_refused() -> None:
    with pytest.raises(InputChanged, match=r"batch\[0\] was float32\[16, 8\].*float64\[16, 8\]"):
        feed(lambda b: b[0].sum(), [(X,), (X.double(),)])


PAIR = {"a": X, "b": [X, Y]}


@pytest.mark.parametrize(
    "batches",
    [
        [PAIR, {"a": X, "b": None}, PAIR],
        [{"a": X, "b": None}, PAIR],
        [{"a": X, "b": X}, {"a": X, "b": None}, {"a": None, "b": X}],
        [(X, None), (None, X), (X, X)],
    ],
    ids=["a list", "a list later", "tensors", "in a tuple"],
)
def test_none_in_the_place_of_a_part_is_another_program(batches: list[Any]) -> None:
    def total(batch: Any) -> Any:
        parts = [x for x in pytree.tree_leaves(batch) if x is not None]
        return torch.stack([x.float().sum() for x in parts]).sum()

    assert feed(total, batches) == pytest.approx([float(total(one)) for one in batches], rel=1e-5)


def test_a_loader_that_ends_before_others_needs_another_program() -> None:
    loaders = CombinedLoader({"a": DataLoader(X, 8), "b": DataLoader(X[:8], 8)}, "max_size")
    with pytest.raises(InputChanged, match=r"\['b'\] is None, .* built for float32"):
        fit(
            lambda: Sum(lambda batch: batch["a"].sum()),
            lambda: (loaders,),
            static=True,
            backend={"max_programs": 1},
        )


def test_a_strided_batch_is_brought_to_the_traced_layout() -> None:
    wide = torch.randn(16, 16)
    strided = wide[:, ::2]
    transposed = torch.randn(8, 16).T
    losses = feed(lambda b: (b * torch.arange(8.0)).sum(), [X, strided, transposed, X.contiguous()])
    wanted = [float((x * torch.arange(8.0)).sum()) for x in (X, strided, transposed, X)]
    assert losses == pytest.approx(wanted, rel=1e-6)


def test_a_contiguous_batch_is_brought_to_the_layout_of_a_transposed_first_one() -> None:
    transposed = torch.randn(8, 16).T
    losses = feed(lambda b: b.T.view(-1)[:20].sum(), [transposed, X])  # a view of that layout alone
    wanted = [float(x.T.reshape(-1)[:20].sum()) for x in (transposed, X)]
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_batch_first_seen_expanded_is_laid_out() -> None:
    expanded = torch.arange(8.0).expand(16, 8)
    assert feed(lambda b: b.sum(), [expanded, X]) == pytest.approx([448.0, float(X.sum())])


@pytest.mark.parametrize("other", [[X, Y], {"x": X}, (X, Y), X])
def test_a_batch_of_another_structure_is_refused(other: Any) -> None:
    with pytest.raises(InputChanged, match="another structure than the traced one"):
        feed(lambda b: b[0].sum(), [(X,), other])


@pytest.mark.parametrize(
    "item", [(X[0], "a"), (X[0], ("a", 1.0)), (X[0], {"name": ("a",)}), (X[0], ["a", "b"])]
)
def test_strings_that_a_smaller_last_batch_has_fewer_of(item: Any) -> None:
    """``default_collate`` makes a tuple of the strings of a batch."""
    batches = [default_collate([item] * count) for count in (4, 4, 2)]
    assert len(feed(lambda b: b[0].sum(), batches)) == 3


def test_a_tensor_in_the_place_of_a_string_is_another_structure() -> None:
    with pytest.raises(InputChanged, match="another structure than the traced one"):
        feed(lambda b: b[0].sum(), [(X, ("a", "b")), (X, (X,))])


def test_two_views_of_one_storage_work() -> None:
    data = [torch.arange(12.0).reshape(3, 4) + i for i in range(3)]
    losses = feed(lambda b: (b[0] * 2 + b[1]).sum(), [(d[:, :-1], d[:, 1:]) for d in data])
    assert losses == [float((d[:, :-1] * 2 + d[:, 1:]).sum()) for d in data]


@pytest.mark.numbers
def test_a_batch_that_is_the_model_s_own_memory_is_copied_apart() -> None:
    class Moves(Sum):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    module = Moves(lambda b: b * 3)
    batches = [module.weight.detach(), module.weight.detach()]
    reference = Moves(lambda b: b * 3)
    theirs = [reference.weight.detach(), reference.weight.detach()]
    results = []
    for one, data, static in ((module, batches, True), (reference, theirs, False)):
        trainer = make_trainer(static, max_epochs=1)
        trainer.fit(one, DataLoader(data, batch_size=None, collate_fn=lambda b: b))
        results.append(one.weight.item())
    assert results[0] == pytest.approx(results[1])


def test_a_step_may_change_a_batch_in_place_unless_memory_is_shared() -> None:
    def double(batch: Any) -> Tensor:
        batch[0].mul_(2)
        return batch[0].sum() + batch[1].sum()

    first, second = torch.ones(4), torch.ones(4)
    assert feed(double, [(first, second)]) == [12.0]
    assert first.tolist() == [2.0] * 4
    whole = torch.ones(8)
    with pytest.raises(UnsupportedInput, match=r"batch\[0\] in place, and batch\[1\] shares"):
        feed(double, [(whole[:4], whole[2:6])])


def test_a_strided_batch_that_the_step_changes_is_changed() -> None:
    def double(batch: Any) -> Tensor:
        batch.mul_(2)
        return batch.sum()

    wide = torch.ones(4, 4)
    feed(double, [torch.ones(4, 2), wide[:, ::2]])
    assert wide.sum() == 8 * 2 + 8


def test_another_shape_is_an_error_that_names_tensor_shapes_and_remedies() -> None:
    with pytest.raises(InputChanged) as error:
        feed(lambda b: b["x"].sum(), [{"x": X}, {"x": X[:5]}], max_programs=1)
    text = str(error.value)
    for part in ("batch['x']", "[5, 8]", "[16, 8]", "drop_last=True", "max_programs=2"):
        assert part in text
    assert error.value.line is not None
    assert error.value.line.file == __file__
    assert error.value.line.source == "def training_step(self, batch: Any) -> Tensor:"


def test_max_programs_allows_another_shape() -> None:
    losses = feed(lambda b: b.sum(), [X, X[:5], X, X[:5]], max_programs=2)
    assert losses == pytest.approx([float(x.sum()) for x in (X, X[:5], X, X[:5])], rel=1e-5)


def test_max_programs_is_a_limit() -> None:
    with pytest.raises(InputChanged, match=r"16 seen.* and 2 may be built"):
        feed(lambda b: b.sum(), [X, X[:5], X[:4]], max_programs=2)


def test_four_shapes_get_programs_and_the_fifth_where_there_may_be_none_an_error() -> None:
    lengths = (37, 39, 40, 38)
    batches = [X[:1].repeat(1, 6)[:, :length] for length in (*lengths, 37, 40)]
    assert len(feed(lambda b: b.sum(), batches)) == 6
    more = [*batches, X[:1].repeat(1, 6)[:, :45]]
    assert len(feed(lambda b: b.sum(), more)) == 7
    with pytest.raises(InputChanged) as error:
        feed(lambda b: b.sum(), more, max_programs=4)
    text = str(error.value)
    assert "batch, dimension 1: 37, 38, 39, 40 and 45 seen" in text
    [line] = [line for line in text.splitlines() if "torch.nn.functional.pad" in line]
    space = {"torch": torch, "x": batches[0]}
    exec(line.strip(), space)
    assert space["x"].shape == (1, 48)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("compute", "first", "second"),
    [
        (lambda b: b[0].sum() * b[1], 2, 3),
        (lambda b: b[0].sum() * b[1], 0.5, 0.25),
        (lambda b: sum(b[0].sum() for _ in range(b[1])), 2, 3),
        (lambda b: b[0].sum() if b[1] == "yes" else -b[0].sum(), "yes", "no"),
        (lambda b: {"yes": 1, "no": 2}[b[1]] * b[0].sum(), "yes", "no"),
        (lambda b: int(b[1]) * b[0].sum(), "1", "2"),
        (lambda b: b[0].sum() if b[1] else b[0].mean(), True, False),
    ],
)
def test_a_constant_that_the_step_read_may_not_change(
    compute: Any, first: Any, second: Any
) -> None:
    with pytest.raises(InputChanged, match=rf"batch\[1\] was {first!r}.*{second!r}"):
        feed(compute, [(X, first), (X, first), (X, second)])


@pytest.mark.parametrize(("first", "second"), [(1, 2), (0.5, 1.5), ("a.png", "b.png")])
def test_a_constant_that_the_step_did_not_read_may_change(first: Any, second: Any) -> None:
    assert len(feed(lambda b: b[0].sum(), [(X, first), (X, second)])) == 2


def test_a_batch_of_objects_is_refused_where_it_is_used() -> None:
    class Graph:
        x = X

    with pytest.raises(UnsupportedInput, match=r"batch\[0\] is a Graph.*"):
        feed(lambda b: b[0].x.sum(), [(Graph(),)])


def test_named_tuples_and_nested_batches_work() -> None:
    class Pair(NamedTuple):
        x: Tensor
        y: Any

    batch = Pair(X, {"more": [X, (X, None)]})
    losses = feed(lambda b: b.x.sum() + b.y["more"][1][0].sum(), [batch, batch])
    assert losses == pytest.approx([2 * float(X.sum())] * 2, rel=1e-5)


def test_a_smaller_last_batch_is_refused_before_step_0() -> None:
    strict = {"max_programs": 1}
    with pytest.raises(InputChanged) as error:
        fit(lambda: Classifier(mlp()), lambda: (loader(50),), static=True, backend=strict)
    for part in (
        "training loader",
        "50 samples",
        "batches of 16",
        "drop_last=True",
        "max_programs='auto'",
    ):
        assert part in str(error.value)


class Validated(Classifier):
    """With a validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


@pytest.mark.parametrize("sanity", [0, 2])
def test_a_smaller_last_validation_batch_is_refused_before_step_0(sanity: int) -> None:
    made: list[Validated] = []

    def make() -> Validated:
        made.append(Validated(mlp()))
        return made[0]

    options: dict[str, Any] = {"num_sanity_val_steps": sanity, "backend": {"max_programs": 1}}
    with pytest.raises(InputChanged, match="validation loader"):
        fit(make, lambda: (loader(64), loader(50)), static=True, **options)
    assert not made[0].calls


def test_loaders_with_smaller_last_batches_are_named_together() -> None:
    loaders = [loader(64), loader(50), loader(49)]
    with pytest.raises(InputChanged) as error:
        make_trainer(True, backend={"max_programs": 1}).validate(Validated(mlp()), loaders)
    for text in ("validation loader 1 is smaller: 50", "validation loader 2 is smaller: 49"):
        assert text in str(error.value)
    assert "loader 0" not in str(error.value)


@pytest.mark.parametrize("options", [{"limit_train_batches": 3}, {"overfit_batches": 2}])
def test_a_smaller_last_batch_that_is_never_reached_is_fine(options: dict[str, Any]) -> None:
    strict = {"max_programs": 1}
    fit(lambda: Classifier(mlp()), lambda: (loader(50),), static=True, backend=strict, **options)


@pytest.mark.numbers
def test_smaller_last_batches_simply_work() -> None:
    ours = fit(
        lambda: Validated(mlp()), lambda: (loader(50), loader(50)), static=True, max_epochs=2
    )
    stock = fit(
        lambda: Validated(mlp()), lambda: (loader(50), loader(50)), static=False, max_epochs=2
    )
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)
    assert ours.final == pytest.approx(stock.final, rel=1e-5)
    programs = ours.trainer.strategy.programs
    assert [program.stage for program in programs] == ["training"] * 2 + ["validation"] * 2
    shapes = [r"[2, 8], and the program was built for [16, 8]", "[2], and"]
    for program in programs[1::2]:
        assert all(shape in program.reason for shape in shapes)
        assert program.reason.startswith(
            "number 2 (shape 2 of at most 4), since batch[0] has shape"
        )


def test_validate_test_and_predict_see_current_weights_in_eval_mode() -> None:
    module = Validated(nn.Sequential(*mlp(0.5), nn.BatchNorm1d(CLASSES)))
    trainer = fulgurite.Trainer(backend=csx(), max_epochs=1, **QUIET)
    trainer.fit(module, loader(64), loader(32))
    reference = pl.Trainer(accelerator="cpu", **QUIET)
    for method in ("validate", "test"):
        [ours] = getattr(trainer, method)(module, loader(32), verbose=False)
        [theirs] = getattr(reference, method)(module, loader(32), verbose=False)
        assert ours == pytest.approx(theirs, rel=1e-5)
    with torch.no_grad():
        module.net[0].weight.add_(0.1)
    got = torch.cat(trainer.predict(module, loader(32)))
    module.eval()
    torch.testing.assert_close(got, module.net(rows(32).tensors[0]).detach())
    with torch.no_grad():
        module.net[0].weight.add_(0.1)
    again = torch.cat(trainer.predict(module, loader(32)))
    torch.testing.assert_close(again, module.net(rows(32).tensors[0]).detach())
    assert not torch.equal(got, again)


class Flattens(Sum):
    def validation_step(self, batch: Any) -> None:
        self.log("flat", self.compute(batch) * self.weight)

    predict_step = Sum.training_step


@pytest.mark.parametrize("batch", [slice(0, 5), slice(None, None, 8)])
def test_parts_of_a_tensor_are_batches_in_inference_mode(batch: slice) -> None:
    """As in a language model's windows: they do not lie one element after another."""
    table = torch.arange(160.0).view(4, 40)
    weights = torch.arange(20.0)
    batches = DataLoader([table[:, batch], table.flip(1)[:, batch]], batch_size=None)
    module = Flattens(lambda x: (x.flatten() * weights).sum())
    wanted = [float((one.flatten() * weights).sum()) for one in batches]
    trainer = make_trainer(True)
    assert [float(one) for one in trainer.predict(module, batches)] == wanted
    [found] = trainer.validate(module, batches, verbose=False)
    assert found["flat"] == pytest.approx(sum(wanted) / 2)
