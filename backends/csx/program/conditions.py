"""What a program was built on, besides the batch; when it changes, another program is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from fulgurite.backends.csx.diagnostics.errors import StateChanged

_SETTINGS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


class Conditions(NamedTuple):
    """What every step compares."""

    requires_grad: tuple[bool, ...]
    training: tuple[bool, ...]
    group_sizes: tuple[int, ...]
    options: tuple[Any, ...]  # of param groups, that are no numbers
    states: tuple[int, ...]  # identity of each optimizer's state
    settings: tuple[Any, ...]  # accumulation window, gradient clipping

    def difference(
        self, now: Conditions, stage: str, modules: list[nn.Module], parameters: list[str]
    ) -> str:
        """In words, what no longer is as it was.

        Args:
            now: the conditions now.
            stage: whose step it is.
            modules: all of the model's, in the order of ``training``.
            parameters: their names, in the order of ``requires_grad``.

        Raises:
            StateChanged: a module is in another mode, which no other program may answer.
        """
        for module, was, is_now in zip(modules, self.training, now.training, strict=True):
            if was != is_now:
                mode = {True: "train", False: "eval"}
                raise StateChanged(
                    f"{type(module).__name__} was in {mode[was]} mode when the {stage} program"
                    f" was built, and now is in {mode[is_now]} mode.",
                    remedy="set the mode before the first step, and leave it",
                )
        if self.requires_grad != now.requires_grad:
            triples = zip(parameters, self.requires_grad, now.requires_grad, strict=True)
            names = [name for name, was, is_now in triples if was != is_now]
            return f"requires_grad of {names[0]} changed ({len(names)} parameters in all)"
        if self.group_sizes != now.group_sizes:
            return (
                f"the param groups had {list(self.group_sizes)} parameters, and now have"
                f" {list(now.group_sizes)}"
            )
        if self.options != now.options:
            return f"the param groups' options were {self.options}, and now are {now.options}"
        changed = [
            f"{name} was {was!r}, and now is {is_now!r}"
            for name, was, is_now in zip(_SETTINGS, self.settings, now.settings, strict=True)
            if was != is_now
        ]
        return "; ".join(changed)
