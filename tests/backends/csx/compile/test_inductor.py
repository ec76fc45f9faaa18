"""The compiler is imported when something is compiled."""

from __future__ import annotations

import subprocess
import sys

INTERRUPTED = """
import signal
import sys

from fulgurite.backends.csx.compile import inductor


class PressesCtrlC:
    pressed = 0

    def find_spec(self, name, *rest):
        if name == "torch._inductor.fx_passes.post_grad" and not self.pressed:
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, keyboard := PressesCtrlC())
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    inductor._import_compiler()
except KeyboardInterrupt:
    print(keyboard.pressed, "torch._inductor.compile_fx" in sys.modules)
inductor._import_compiler()
from torch._inductor.lowering import lowerings

print(sorted(str(operation) for operation in lowerings if str(operation).startswith("fulgurite")))
"""


def test_a_ctrl_c_while_the_compiler_is_imported_leaves_it_whole() -> None:
    """Half imported it would be lost to this process: what it registers, it registers once."""
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "1 True",
        "['fulgurite.cbfloat16.default', 'fulgurite.realize.default']",
    ], done.stderr
