"""What a trace changes in others' code is put back, whatever ends it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from fulgurite.backends.patches import applied, patched, patches_of


class Base:
    """Has a method of its own, and passes it on."""

    @staticmethod
    def answer() -> int:
        return 42


class Child(Base):
    """Inherits its method."""


def owners() -> tuple[ModuleType, nn.Module]:
    """A module of Python's with one name, and one of torch's, whose class has another."""
    module = ModuleType("somebodys")
    vars(module)["number"] = 1
    return module, nn.Module()


def change(module: ModuleType, other: nn.Module) -> list[tuple[Any, str, Any]]:
    return [
        *((module, "number", 2), (module, "number", 3), (module, "more", 4)),
        *((other, "dump_patches", 5), (Child, "answer", lambda: 6)),
    ]


def test_attributes_have_their_new_values_inside_and_the_old_ones_after() -> None:
    module, other = owners()
    before = dict(vars(module)), dict(vars(other)), dict(vars(Child))
    with patched(change(module, other)):
        assert (vars(module)["number"], vars(module)["more"]) == (3, 4)
        assert (other.dump_patches, Child.answer(), Base.answer()) == (5, 6, 42)
    assert (dict(vars(module)), dict(vars(other)), dict(vars(Child))) == before
    assert Child.answer() == 42


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_exception_puts_everything_back(error: type[BaseException]) -> None:
    module, other = owners()

    def fail() -> None:
        with patched(change(module, other)):
            raise error

    with pytest.raises(error):
        fail()
    assert (vars(module)["number"], Child.answer()) == (1, 42)
    assert not hasattr(module, "more")


def test_a_change_that_cannot_be_made_undoes_those_before_it() -> None:
    module, other = owners()

    def changes() -> Iterator[tuple[Any, str, Any]]:
        yield module, "number", 2
        yield other, "dump_patches", vars(module)["missing"]

    with pytest.raises(KeyError, match="missing"), patched(changes()):
        pass
    assert vars(module)["number"] == 1


def test_who_imported_a_function_by_name_has_the_patch_too_and_other_names_stay() -> None:
    module, importer = ModuleType("somebodys"), ModuleType("users")
    vars(module).update(answer=Base.answer, quiet=True)
    vars(importer).update(ask=Base.answer, quiet=True, more=[Base.answer])
    before = dict(vars(importer))
    replacements = {"answer": lambda: 6, "quiet": False}
    patches = patches_of(module, replacements, why="to see it", checked="nothing 1.0")
    with applied(patches, [vars(importer), vars(importer)]):
        assert (vars(module)["answer"](), vars(module)["quiet"]) == (6, False)
        assert vars(importer)["ask"]() == 6
        assert (vars(importer)["quiet"], vars(importer)["more"]) == (True, [Base.answer])
    assert vars(importer) == before
    assert vars(module)["answer"] is Base.answer
