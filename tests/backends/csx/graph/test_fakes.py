"""Results that are made anew are those that torch's fakes would give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import convnet, mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.backends.csx.graph import fakes
from fulgurite.backends.csx.graph.fakes import new_fake, results_of, twin

ATEN = torch.ops.aten
MODE = FakeTensorMode(allow_non_fake_inputs=True)
MODE.cache_enabled = False


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have run, nothing is known at first."""
    monkeypatch.setattr(fakes, "_found", {})


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def call(func: Any, *args: Any, **kwargs: Any) -> Any:
    with MODE, torch.no_grad():
        return results_of(MODE, func, args, kwargs)


class Compared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation both ways; ``known`` counts those that were made anew."""

    known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wanted = func(*args, **(kwargs or {}))
        before = len(fakes._found)
        found = results_of(MODE, func, args, kwargs or {})
        self.known += len(fakes._found) == before
        for one, other in zip(leaves(found), leaves(wanted), strict=True):
            assert described(one, args) == described(other, args), func
        return wanted


def leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def described(tensor: Any, args: Any) -> Any:
    """What a fake is, and in which of these tensors' memory it lies."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    memory = tensor.untyped_storage()
    others = [one.untyped_storage()._cdata for one in args if isinstance(one, Tensor)]
    in_memory = [memory._cdata == one for one in others]
    keys = torch._C._dispatch_keys(tensor)
    return fakes.layout_of(tensor), memory.nbytes(), in_memory, str(keys), sorted(vars(tensor))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 6, batch_first=True), nn.GRU(6, 6, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]  # type: ignore[no-any-return]


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: mlp(0.2), lambda: torch.randn(4, 8)),
    "convnet": (convnet, lambda: torch.randn(4, 1, 8, 8)),
    "attention": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda: torch.randn(2, 6, 16),
    ),
    "recurrent": (Recurrent, lambda: torch.randn(3, 5, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_whole_steps_of_known_results_are_torchs(name: str) -> None:
    make, batch = NETS[name]
    net, x = make(), MODE.from_tensor(batch())
    with MODE:
        real = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    values = {
        key: MODE.from_tensor(one.detach()).requires_grad_(one.requires_grad)
        for key, one in real.items()
    }
    for _ in range(2):
        with MODE, Compared() as compared:
            result = torch.func.functional_call(net, values, x)
            result.float().square().mean().backward()
    assert compared.known > 10  # all of the second step, and more


def test_what_follows_from_the_kind_of_a_number_is_not_mixed_up() -> None:
    x = fake(3, dtype=torch.int64)
    kinds = [call(ATEN.mul.Tensor, x, MODE.from_tensor(torch.tensor(2))) for _ in range(2)]
    numbers = [call(ATEN.add.Scalar, x, one).dtype for one in (1, 1.0, True, 1, 1.0, True)]
    assert [one.dtype for one in kinds] == [torch.int64] * 2
    assert numbers == [torch.int64, torch.float32, torch.int64] * 2


def test_results_follow_the_default_dtype() -> None:
    x = fake(3, dtype=torch.int64)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        found.append(call(ATEN.div.Tensor, x, x).dtype)
    assert found == [torch.float32, torch.bfloat16, torch.float32]


def test_a_known_view_lies_in_the_memory_of_its_own_argument() -> None:
    for _ in range(2):
        x = fake(3, 4)
        turned = call(ATEN.t.default, x)
        assert turned.shape == (4, 3)
        assert turned.untyped_storage()._cdata == storage(x)
        parts = call(ATEN.split.Tensor, x, 1)
        assert isinstance(parts, list)
        assert {*map(storage, parts)} == {storage(x)}
        assert [one.storage_offset() for one in parts] == [0, 4, 8]


def test_inference_mode_has_results_of_its_own() -> None:
    x = fake(3, 4)
    for inference in (False, True, True, False):
        with torch.inference_mode(inference):
            new, view = call(ATEN.neg.default, x), call(ATEN.t.default, x)
            of_new = call(ATEN.t.default, new)
            found = [one.is_inference() for one in (new, view, of_new, twin(new))]
        assert found == [inference, False, inference, inference]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Known(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Results are made anew where they are known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return results_of(MODE, func, args, kwargs or {})


@pytest.mark.parametrize("view", [Tensor.t, Tensor.detach, lambda x: x[1:], Tensor.clone])
def test_what_is_written_is_told_of_a_known_view_too(view: Callable[[Tensor], Tensor]) -> None:
    """By its version, as autograd tells it; so are tensors that a step rebinds (``check_ties``)."""
    versions = []
    for _ in range(2):
        x = fake(3, 4)
        with MODE, Known():
            y = view(x)
            before = x._version, y._version
            x.add_(1)
            y.mul_(2)
        versions.append((before, x._version, y._version))
    assert versions[0] == versions[1]
    assert versions[0][0] == (0, 0)


def test_what_is_changed_in_place_is_the_argument() -> None:
    for _ in range(2):
        x = fake(3, 4)
        assert call(ATEN.add_.Tensor, x, x) is x
        assert call(ATEN.add_.Tensor, x, fake(4)) is x


def test_an_error_comes_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim"):
            call(ATEN.mm.default, fake(2, 3), fake(2, 3))


def test_an_argument_in_more_memory_is_another_one() -> None:
    for x in (fake(4), call(ATEN.slice.Tensor, fake(100), 0, 0, 4), fake(4)):
        call(ATEN.neg.default, x)
    assert [key[0] for key in fakes._found].count(ATEN.neg.default) == 2


def test_an_operation_that_turns_its_argument_runs_each_time() -> None:
    for _ in range(2):
        x = fake(3, 4)
        assert call(ATEN.t_.default, x) is x
        assert x.shape == (4, 3)


def test_results_that_hang_on_values_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="nonzero"):
            call(ATEN.nonzero.default, fake(3))


def test_a_function_of_the_users_is_asked_each_time() -> None:
    asked = []

    @torch.library.custom_op("fulgurite_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        asked.append(x)
        return x.new_empty(len(asked))

    with MODE:
        sizes = [call(torch.ops.fulgurite_test.twice.default, fake(3)).shape[0] for _ in range(3)]
    assert sizes == [1, 2, 3]


def test_known_results_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_MOST", 3)
    for n in range(1, 9):
        assert call(ATEN.neg.default, fake(n)).shape == (n,)
    assert len(fakes._found) <= 3


def test_nothing_that_is_known_keeps_a_mode_or_a_fake() -> None:
    mode = FakeTensorMode()
    mode.cache_enabled = False
    for _ in range(2):
        with mode, torch.no_grad():
            x = torch.empty(3, 4)
            made = results_of(mode, ATEN.native_layer_norm.default, (x, (4,), None, None, 1e-5), {})
    alive = [weakref.ref(one) for one in (mode, x, *made, twin(x))]  # type: ignore[arg-type]
    del mode, x, made
    gc.collect()
    assert [one() for one in alive] == [None] * len(alive)


@pytest.mark.parametrize("layout", [((3, 4), (4, 1)), ((3, 4), (1, 3)), ((0, 4), (4, 1)), ((), ())])
def test_a_new_fake_is_as_torch_makes_one(layout: tuple[Any, Any]) -> None:
    with MODE:
        wanted = torch.empty_strided(*layout, dtype=torch.float16)
    made = new_fake(MODE, *layout, torch.float16, torch.device("cpu"))
    assert described(made, ()) == described(wanted, ())
    assert type(made) is type(wanted)


def test_a_twin_is_the_same_tensor_to_all_but_autograd() -> None:
    leaf = fake(3, 4).requires_grad_()
    for one in (leaf, leaf.t(), leaf[1:], fake(2, dtype=torch.complex64).conj()):
        other = twin(one)  # type: ignore[arg-type]
        assert described(other, (one,)) == described(one, (one,))
        assert other is not one
        assert other._version == one._version == 0
        assert not other.requires_grad
        assert other.is_conj() is one.is_conj()
