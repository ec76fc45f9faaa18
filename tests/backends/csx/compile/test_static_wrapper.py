"""The compiler's wrapper in static form: the same operations, small intermediates made once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.backends.csx.compile import static_wrapper as wrapper
from fulgurite.backends.csx.compile.static_wrapper import UnknownWrapper, make_static, parsed
from fulgurite.backends.csx.compile.translation_unit import Kernel

HEAD = """
import torch
from torch._inductor.async_compile import AsyncCompile
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()
double = async_compile.cpp_pybinding(['const float*', 'float*'], 'the source of a kernel')
async_compile.wait(globals())
del async_compile

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
"""
TAIL = """
runner = Runner(partitions=[])
call = runner.call
"""
BODY = """
a, = args
args.clear()
buf0 = empty_strided_cpu((2, 3), (3, 1), torch.float32)
double(a, buf0)
del a
buf1 = buf0; del buf0  # reuse
buf2 = empty_strided_cpu((3, 2), (2, 1), torch.float32)
double(reinterpret_tensor(buf1, (3, 2), (1, 3), 0), buf2)
del buf1
buf3 = buf2; del buf2  # reuse
buf4 = torch.ops.aten.sin.default(reinterpret_tensor(buf3, (2, 3), (1, 2), 0))
del buf3
return (buf4, )
"""


def source(body: str) -> str:
    return HEAD + "".join(f"        {line}\n" for line in body.strip().splitlines()) + TAIL


def load(body: str) -> tuple[Any, dict[str, Any]]:
    """(call, namespace) of the static form."""
    whole = parsed(source(body))
    assert whole.kernels == [Kernel("double", "the source of a kernel")]
    namespace: dict[str, Any] = {"double": lambda x, out: torch.mul(x, 2, out=out)}
    exec(make_static(whole), namespace)
    return namespace["call"], namespace


def made_once(body: str) -> set[str]:
    return {name for name in load(body)[1] if name.startswith("buf")}


def test_intermediates_and_their_views_are_made_once() -> None:
    call, namespace = load(BODY)
    assert {"buf0", "view0"} <= set(namespace)
    x = torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(call([x])[0], torch.sin(x * 4))


def test_what_may_be_returned_is_made_anew() -> None:
    assert made_once(BODY) == {"buf0"}
    assert made_once(BODY.replace("return (buf4, )", "return (buf3, )")) == {"buf0"}
    copied = BODY.replace("return (buf4, )", "buf5 = torch.zeros(2)\nreturn (buf5, )")
    assert made_once(copied) == {"buf0", "buf2"}
    call, _ = load(BODY)
    first, second = call([torch.ones(2, 3)])[0], call([torch.zeros(2, 3)])[0]
    assert not torch.equal(first, second)


def test_branches_are_left_as_they_are() -> None:
    assert made_once(BODY.replace("del a\n", "if True: pass\n")) == set()


def test_views_of_an_input_are_made_once_a_step() -> None:
    body = """
a, b = args
args.clear()
buf0 = empty_strided_cpu((3, 2), (2, 1), torch.float32)
double(reinterpret_tensor(a, (3, 2), (1, 3), 0), buf0)
buf1 = torch.mm(buf0, reinterpret_tensor(b, (2, 3), (1, 2), 0))
buf2 = torch.mm(buf1, reinterpret_tensor(a, (3, 2), (1, 3), 0))
del a
return (buf2, )
"""
    whole = parsed(source(body))
    assert make_static(whole).count("reinterpret_tensor(a, ") == 1
    call, _ = load(body)
    for _ in range(2):
        a, b = torch.randn(2, 3), torch.randn(3, 2)
        wanted = (2 * a.T) @ b.T @ a.T
        torch.testing.assert_close(call([a, b])[0], wanted)


def test_only_the_smallest_intermediates_are_made_once(monkeypatch: Any) -> None:
    copied = BODY.replace("return (buf4, )", "return (torch.zeros(2), )")
    monkeypatch.setattr(wrapper, "RESIDENT_BYTES", 24)
    assert made_once(copied) == {"buf0"}
    monkeypatch.setattr(wrapper, "RESIDENT_BYTES", 23)
    assert made_once(copied) == set()


def test_an_unknown_form_is_an_error() -> None:
    for unknown in (
        HEAD.replace("async_compile.cpp_pybinding(", "async_compile.triton("),
        HEAD.replace("'the source of a kernel'", "'the source of a kernel', 1"),
        HEAD.replace("class Runner:", "class Runner(list):\n    pass\nclass Other:").replace(
            "def call(self, args)", "def other(self, args)"
        ),
    ):
        with pytest.raises(UnknownWrapper):
            parsed(unknown + "        return (args,)\n" + TAIL)
    with pytest.raises(UnknownWrapper, match="Runner"):
        parsed("import torch")


def test_random_numbers_are_drawn_into_memory_that_is_made_once() -> None:
    call, namespace = load("""
buf0 = torch.ops.fulgurite.uniform.default([3, 2], [1, 3], torch.float32, -1.0, 1.0)
buf1 = buf0
assert_alignment(buf1, 16, 'torch.ops.fulgurite.uniform.default')
del buf0
buf2 = empty_strided_cpu((3, 2), (1, 3), torch.float32)
double(buf1, buf2)
del buf1
return (buf2, )
""")
    assert {name for name in namespace if name.startswith("buf")} == {"buf0"}
    torch.manual_seed(1)
    drawn = call([])[0]
    torch.manual_seed(1)
    wanted = torch.empty_strided((3, 2), (1, 3)).uniform_(-1, 1) * 2
    torch.testing.assert_close(drawn, wanted, rtol=0, atol=0)
