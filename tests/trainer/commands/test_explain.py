"""``fulgurite explain``: a page for each error, by a name as it was read or nearly so."""

from __future__ import annotations

import pytest

import fulgurite.errors
from fulgurite.cli import main
from fulgurite.errors import HostRead, TraceError


@pytest.mark.parametrize("given", ["HostRead", "hostread", "fulgurite.errors.HostRead"])
def test_a_page_is_shown(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", given]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# HostRead\n\nThe step's Python read the value of a computed tensor")
    assert "Instead:" in shown
    assert "<a id" not in shown


def test_a_wrong_name_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "HostReed"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("fulgurite explain: there is no error 'HostReed'. Did you mean Host")
    assert said.out == ""


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    names = capsys.readouterr().out.split()
    kinds = {name for name, one in vars(fulgurite.errors).items() if isinstance(one, type)}
    steps = {name for name in kinds if issubclass(getattr(fulgurite.errors, name), TraceError)}
    assert steps - {"TraceError"} <= {*names}


def test_an_error_names_its_page() -> None:
    from fulgurite.backends.csx.diagnostics.trace_errors import UsersFramesAlone

    with pytest.raises(HostRead) as caught, UsersFramesAlone(), UsersFramesAlone():
        raise HostRead("x was read")
    assert caught.value.__notes__ == ["More: fulgurite explain HostRead"]
