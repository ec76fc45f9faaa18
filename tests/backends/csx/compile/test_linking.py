"""The wrappers of parts as one: views of inputs are copied, and no name outlives its call."""

from __future__ import annotations

import ast

from fulgurite.backends.csx.compile.linking import Compiled, linked
from fulgurite.backends.csx.compile.parts import Call, Division
from fulgurite.backends.csx.compile.static_wrapper import parsed

PART = """
class Runner:
    def call(self, args):
        a, b = args
        args.clear()
        buf0 = empty_strided_cpu((2,), (1,), torch.float32)
        torch.add(a, b, out=buf0)
        buf1 = reinterpret_tensor(b, (1, 2), (2, 1), 0)
        del b
        return (buf0, buf1, reinterpret_tensor(a, (2, 1), (1, 1), 0))
"""


def test_a_view_of_an_input_is_copied_and_no_name_outlives_its_call() -> None:
    calls = (Call(0, (0, 1), (2, 3, 4)), Call(0, (2, 1), (5, 6, 7)))
    division = Division((), calls, inputs=(0, 1), outputs=(5, 3))
    part = Compiled(parsed(PART), {})
    text = ast.unparse(linked([part], division, lambda kernel: kernel.name).wrapper.function)
    for clone in ("v3 = torch.clone(buf1_0)", "v6 = torch.clone(buf1_1)"):
        assert clone in text
    assert text.count("torch.clone(reinterpret_tensor(") == 2
    assert "v2 = buf0_0\n" in text
    for name in ("buf0_0", "buf1_0", "buf0_1", "buf1_1", "v2", "v4", "v1"):
        assert text.count(f"del {name}\n") == 1, name
